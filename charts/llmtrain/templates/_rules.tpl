{{/* The same as IN_JOB_NAMESPACES and FOR_OWNER_REFERENCES of operator/llmtrain_operator/kube/permissions.py; a test compares them. */}}
{{- define "llmtrain.jobRules" -}}
- apiGroups: [llmtrain.dev]
  resources: [llmtrainjobs]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [llmtrain.dev]
  resources: [llmtrainjobs/status]
  verbs: [patch]
- apiGroups: [llmtrain.dev]
  resources: [llmtrainjobs/finalizers] # asked for by OwnerReferencesPermissionEnforcement; never used otherwise
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [secrets] # the agents' tokens: written, never read
  verbs: [create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
