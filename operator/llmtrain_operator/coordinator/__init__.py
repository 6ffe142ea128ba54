"""Where agents report and get their orders (HTTP), and the in-memory view of them."""
