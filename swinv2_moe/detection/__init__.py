"""COCO detection with mmdetection. Importing this imports none of it; `registry` does, for
configurations."""
