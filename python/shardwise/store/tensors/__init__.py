"""The tensors that are wanted: from which pieces they are made, under which names, how cut."""
