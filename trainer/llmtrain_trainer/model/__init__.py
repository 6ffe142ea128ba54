"""The network, as plain torch modules: nothing here knows that it will be sharded."""
