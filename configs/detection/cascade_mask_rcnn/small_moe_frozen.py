# Cascade Mask R-CNN on SwinV2-MoE-S, 8 experts, MoE layers frozen; COCO 2017, 36 epochs.
#
#   torchrun --nproc_per_node 8 \
#       -m swinv2_moe detect train detection/cascade_mask_rcnn/small_moe_frozen \
#       --pretrained output/swin_moe_small_window12_192_8expert
#
# Hardware: 8 GPUs of 32 GB, 2 images each. Duration: not measured.
# Published: nothing with this backbone.
# Measured here: nothing yet; that it builds is tested.
_base_ = "./small_dense.py"

moe_blocks = ((), (), tuple(range(1, 18, 2)), (1,))
model = dict(backbone=dict(num_experts=8, moe_blocks=moe_blocks, freeze_moe=True))
