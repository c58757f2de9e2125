# A SwinV2-MoE that learns in minutes on two CPU cores, and heads to match; detectors on it take
# their parts from here.
nano = dict(
    backbone=dict(
        _delete_=True,
        type="SwinV2MoE",
        embed_dim=32,
        depths=(2, 2, 4, 2),
        num_heads=(1, 2, 4, 8),
        window_size=8,
        num_experts=4,
        moe_blocks=((), (), (1, 3), (1,)),
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=64),
    rpn_head=dict(in_channels=64, feat_channels=64),
    roi_extractor=dict(out_channels=64),
    bbox_head=dict(in_channels=64, fc_out_channels=256, reg_class_agnostic=True),
    mask_head=dict(in_channels=64, conv_out_channels=64),
    # there are few objects; RoIAlign is what takes the time
    rpn_proposal=dict(nms_pre=500, max_per_img=100),
    rois=dict(num=64),
)
