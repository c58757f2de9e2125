# SwinV2-S, dense, and a neck that takes its maps; detectors on it take both from here.
small = dict(
    backbone=dict(
        _delete_=True,
        type="SwinV2MoE",
        model="swin_moe",  # the form that was trained and released; swinv2_moe: the real Swin V2
        embed_dim=96,
        depths=(2, 2, 18, 2),
        num_heads=(3, 6, 12, 24),
        window_size=12,
        # pretrained at 192 px, where the last stage has 6 x 6 tokens
        pretrained_window_sizes=(12, 12, 12, 6),
        num_experts=0,
        eval_capacity_factor=1.25,  # as published; frozen experts use it in training, too
        drop_path_rate=0.2,
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
