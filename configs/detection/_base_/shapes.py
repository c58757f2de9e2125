# The generated shapes (python data/make_shapes.py data/shapes).
_base_ = "./runtime.py"

data_root = "data/shapes/"
metainfo = dict(
    classes=("circle", "square", "triangle"), palette=[(220, 20, 60), (30, 144, 255), (50, 205, 50)]
)
load = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(256, 256), keep_ratio=True),
]
train_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="RepeatDataset",
        # an epoch is four passes: 5 epochs of one end at a box AP of 46 to 61 (docs/log.md)
        times=4,
        dataset=dict(
            type="CocoDataset",
            data_root=data_root,
            ann_file="annotations/instances_train.json",
            data_prefix=dict(img="train/"),
            metainfo=metainfo,
            pipeline=[
                *load,
                dict(type="RandomFlip", prob=0.5),
                dict(type="PackDetInputs"),
            ],
        ),
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="CocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_val.json",
        data_prefix=dict(img="val/"),
        metainfo=metainfo,
        test_mode=True,
        pipeline=[
            *load,
            dict(
                type="PackDetInputs",
                meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
            ),
        ],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(
    type="FasterCocoMetric",
    ann_file=data_root + "annotations/instances_val.json",
    metric=["bbox", "segm"],
)
test_evaluator = val_evaluator

train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=5, val_interval=5)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=20),
    dict(
        type="CosineAnnealingLR",
        eta_min=0,
        by_epoch=True,
        begin=0,
        end=5,
        convert_to_iter_based=True,
    ),
]
optim_wrapper = dict(optimizer=dict(lr=1e-3), clip_grad=dict(max_norm=3.0))
default_hooks = dict(logger=dict(interval=10))
randomness = dict(seed=0)
