"""From words and YAML files to a model, data and a trainer; and the sentence to say when that fails."""
