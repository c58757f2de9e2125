# Mask R-CNN on SwinV2-S, dense; COCO 2017, 36 epochs.
#
#   torchrun --nproc_per_node 8 -m swinv2_moe detect train detection/mask_rcnn/small_dense \
#       --pretrained output/swin_moe_small_window12_192_dense
#
# Hardware: 8 GPUs of 32 GB, 2 images each. Duration: not measured.
# Published: nothing with this backbone; Swin-S of the first version reaches 48.5/43.3
# (box/mask AP, github.com/SwinTransformer/Swin-Transformer-Object-Detection).
# Measured here: nothing yet; that it builds is tested.
_base_ = ["../_base_/mask_rcnn.py", "../_base_/coco.py"]
