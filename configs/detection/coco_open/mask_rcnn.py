# Mask R-CNN on a small SwinV2-MoE, from random weights, on 92 photographs of COCO: does it learn
# them by heart?
#
#   swinv2-moe detect train detection/coco_open/mask_rcnn \
#       --output output/coco_open
#   swinv2-moe detect test detection/coco_open/mask_rcnn output/coco_open \
#       --split train
#
# Hardware: one CPU core, 30 minutes of it.
# Measured on the training images: box AP 12.3, AP50 26.3; after 24 epochs more (docs/log.md)
# 26.2, 51.4.
_base_ = [
    "../_base_/mask_rcnn.py",
    "../_base_/nano.py",
    "mmdet::_base_/datasets/coco_instance.py",
    "../_base_/runtime.py",
]

nano = _base_.nano
model = dict(
    backbone=dict(nano.backbone, model="swin_moe"),
    neck=nano.neck,
    # photographs of 640 px are halved, and so are the anchors
    rpn_head=dict(nano.rpn_head, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=nano.roi_extractor,
        bbox_head=nano.bbox_head,
        mask_roi_extractor=nano.roi_extractor,
        mask_head=nano.mask_head,
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200), rcnn=dict(sampler=dict(num=128))
    ),
)

data_root = "data/coco_open/"  # its images/: train/, val/, annotations/instances_{train,val}.json
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(320, 320), keep_ratio=True),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(320, 320), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(
        type="PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]
train_dataloader = dict(
    batch_size=1,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        ann_file="annotations/instances_train.json",
        data_prefix=dict(img="train/"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        ann_file="annotations/instances_val.json",
        data_prefix=dict(img="val/"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="FasterCocoMetric", ann_file=data_root + "annotations/instances_val.json")
test_evaluator = val_evaluator

train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=28, val_interval=28)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(
        type="CosineAnnealingLR",
        eta_min=0,
        by_epoch=True,
        begin=0,
        end=28,
        convert_to_iter_based=True,
    ),
]
optim_wrapper = dict(optimizer=dict(lr=1e-3), clip_grad=dict(max_norm=35.0))
