"""The cluster: its clients and their settings (`client`), questions and changes to it (`admin`). Knows no App."""
