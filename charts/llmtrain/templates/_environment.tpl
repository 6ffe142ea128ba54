{{/* What llmtrain-operator reads: LLMTRAIN_OPERATOR_ and the name of a flag (operator/llmtrain_operator/runtime/settings.py). */}}
{{- define "llmtrain.environment" -}}
{{- $fullname := include "llmtrain.fullname" . -}}
- name: LLMTRAIN_OPERATOR_COORDINATOR_URL
  value: {{ printf "http://%s.%s:%v" $fullname .Release.Namespace .Values.service.coordinatorPort | quote }}
- name: LLMTRAIN_OPERATOR_KEY_FILE
  value: /var/run/secrets/llmtrain.dev/key
- name: LLMTRAIN_OPERATOR_LEASE_NAME
  value: {{ $fullname }}
- name: LLMTRAIN_OPERATOR_NAMESPACES
  value: {{ join "," .Values.watch.namespaces | quote }}
- name: LLMTRAIN_OPERATOR_IMAGE_PULL_POLICY
  value: {{ .Values.worker.imagePullPolicy | quote }}
{{- range $name, $value := .Values.operator }}
- name: LLMTRAIN_OPERATOR_{{ $name | snakecase | upper }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
