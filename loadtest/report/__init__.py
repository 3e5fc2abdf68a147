"""What people read: the page, its pictures, the table, two results beside each other, progress while it runs."""
