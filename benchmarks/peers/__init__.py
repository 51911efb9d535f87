"""The contestants beside Paceline: libtorrent, aria2, and every host for itself from S3."""
