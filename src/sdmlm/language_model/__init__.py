"""From text to tensors: encoding, preference rows, the forward pass, the summary vector h."""
