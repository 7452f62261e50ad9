"""Images in blocks of sixteen channels, and the convolutions and pools that compute on this layout."""
