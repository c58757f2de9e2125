# HTC (without its semantic branch) on SwinV2-S, dense; COCO 2017, 36 epochs.
#
#   torchrun --nproc_per_node 8 -m swinv2_moe detect train detection/htc/small_dense \
#       --pretrained output/swin_moe_small_window12_192_dense
#
# Hardware: 8 GPUs of 32 GB, 2 images each. Duration: not measured.
# Published: nothing with this backbone.
# Measured here: nothing yet; that it builds is tested.
_base_ = ["../_base_/htc.py", "../_base_/coco.py"]
