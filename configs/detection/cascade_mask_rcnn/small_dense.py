# Cascade Mask R-CNN on SwinV2-S, dense; COCO 2017, 36 epochs.
#
#   torchrun --nproc_per_node 8 \
#       -m swinv2_moe detect train detection/cascade_mask_rcnn/small_dense \
#       --pretrained output/swin_moe_small_window12_192_dense
#
# Hardware: 8 GPUs of 32 GB, 2 images each. Duration: not measured.
# Published: nothing with this backbone; Swin-S of the first version reaches 51.9/45.0
# (box/mask AP, github.com/SwinTransformer/Swin-Transformer-Object-Detection).
# Measured here: nothing yet; that it builds is tested.
_base_ = ["../_base_/cascade_mask_rcnn.py", "../_base_/coco.py"]

# As Swin's: four convolutions before the linear layer of each box head, and GIoU of the decoded
# boxes as loss.
box_head = dict(
    type="ConvFCBBoxHead",
    num_shared_convs=4,
    num_shared_fcs=1,
    conv_out_channels=256,
    norm_cfg=dict(type="SyncBN", requires_grad=True),
    reg_decoded_bbox=True,
    loss_bbox=dict(type="GIoULoss", loss_weight=10.0),
)
model = dict(
    roi_head=dict(bbox_head=[dict(stage, **box_head) for stage in _base_.model.roi_head.bbox_head])
)
