from agmerge.errors import NoAnswer as HorovodInternalError

__all__ = ["HorovodInternalError"]
