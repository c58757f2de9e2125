# Mask R-CNN on SwinV2-MoE-S, 8 experts, MoE layers tuned too; COCO 2017, 36 epochs.
#
#   torchrun --nproc_per_node 8 \
#       -m swinv2_moe detect train detection/mask_rcnn/small_moe_tuned \
#       --pretrained output/swin_moe_small_window12_192_8expert
#
# Hardware: 8 GPUs of 32 GB, 2 images each. Duration: not measured.
# Published: nothing with this backbone.
# Measured here: nothing yet; that it builds is tested.
_base_ = "./small_moe_frozen.py"

model = dict(backbone=dict(freeze_moe=False))
