module llmtrain.invalid/pause

go 1.24.0
