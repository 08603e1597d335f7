"""Version of the library, and where it lives; ranks with different versions do not train together.

SITE and SOURCE are placeholders (``.example`` is nobody's) until the project has a home: change them here, and all
links follow, those of errors, of the metadata and of the page on the package index. A release with placeholders is
refused.
"""

from __future__ import annotations

__version__ = "0.1.0"
SITE = "https://agmerge.example"  # the documentation, without a slash at its end
SOURCE = "https://agmerge.example/source"  # the repository: /blob/TAG/PATH, /raw/TAG/PATH and /issues are there
