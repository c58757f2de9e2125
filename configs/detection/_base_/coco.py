# COCO 2017 (swinv2-moe prepare-coco) and Swin's recipe for it (arXiv 2103.14030, section 4.2): 16
# images a step, 36
# epochs, shorter side 480 to 800, half of the images cropped first, AdamW 1e-4 with 0.05 weight
# decay.
_base_ = ["mmdet::_base_/datasets/coco_instance.py", "./runtime.py"]

scales = [(side, 1333) for side in range(480, 801, 32)]
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="RandomFlip", prob=0.5),
    dict(
        type="RandomChoice",
        transforms=[
            [dict(type="RandomChoiceResize", scales=scales, keep_ratio=True)],
            [
                dict(
                    type="RandomChoiceResize",
                    scales=[(400, 1333), (500, 1333), (600, 1333)],
                    keep_ratio=True,
                ),
                dict(
                    type="RandomCrop",
                    crop_type="absolute_range",
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                dict(type="RandomChoiceResize", scales=scales, keep_ratio=True),
            ],
        ],
    ),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(batch_size=2, dataset=dict(pipeline=train_pipeline))  # a GPU; 8 of them
val_evaluator = dict(type="FasterCocoMetric")
test_evaluator = dict(type="FasterCocoMetric")

train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=36, val_interval=1)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type="MultiStepLR", by_epoch=True, begin=0, end=36, milestones=[27, 33], gamma=0.1),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
