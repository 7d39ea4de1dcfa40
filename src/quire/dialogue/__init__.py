"""What a model's answer says: content and calls of tools, in the formats that models were trained on."""
