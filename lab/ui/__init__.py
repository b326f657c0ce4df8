"""Pages of app.py: widgets and layout; every number comes from the packages that compute it."""
