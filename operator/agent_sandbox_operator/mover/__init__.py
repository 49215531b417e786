"""The mover: it alone holds the snapshot store, and moves workspaces between sandboxes and it.

Belongs here: Snapshots, restores, first fills, and what is kept in the store. Must not be here: pods, volumes, anything that kopf does.
"""
