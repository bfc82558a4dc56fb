"""Writers of versions: parallel stripes, streams, plain files, and the commit."""
