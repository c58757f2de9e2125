"""COCO detection with mmdetection. Importing this package does not import mmdetection; `registry`,
which configurations import, does."""
