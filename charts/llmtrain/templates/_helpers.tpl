{{- define "llmtrain.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "llmtrain.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "llmtrain.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "llmtrain.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "llmtrain.selector" -}}
app.kubernetes.io/name: {{ include "llmtrain.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "llmtrain.labels" -}}
{{ include "llmtrain.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "llmtrain.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "llmtrain.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "llmtrain.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "llmtrain.keySecret" -}}
{{- default (printf "%s-key" (include "llmtrain.fullname" .)) .Values.key.existingSecret }}
{{- end }}

{{/* The key in force, else a new one; the same at every use within one rendering, so that its checksum is right. */}}
{{- define "llmtrain.key" -}}
{{- if not (hasKey .Values.key "inForce") }}
{{- $stored := (lookup "v1" "Secret" .Release.Namespace (include "llmtrain.keySecret" .)).data }}
{{- $key := dig "key" "" (default dict $stored) }}
{{- $_ := set .Values.key "inForce" (default (randAlphaNum 48 | b64enc) $key) }}
{{- end }}
{{- .Values.key.inForce }}
{{- end }}
