# Mask R-CNN on SwinV2-B, dense; COCO 2017, 36 epochs.
#
#   torchrun --nproc_per_node 8 -m swinv2_moe detect train detection/mask_rcnn/base_dense \
#       --pretrained output/swin_moe_base_window12_192_dense
#
# Hardware: 8 GPUs of 80 GB, 2 images each. Duration: not measured.
# Published: nothing with this backbone.
# Measured here: nothing yet; that it builds is tested.
_base_ = "./small_dense.py"

model = dict(
    backbone=dict(embed_dim=128, num_heads=(4, 8, 16, 32), drop_path_rate=0.3),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)
