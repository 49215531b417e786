{{- define "agent-sandbox.labels" -}}
app.kubernetes.io/part-of: agent-sandbox
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "agent-sandbox.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/name: agent-sandbox
app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- define "agent-sandbox.name" -}}
{{ printf "%s-%s" .root.Release.Name .component | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- define "agent-sandbox.imageRef" -}}
{{- if .image.digest -}}{{ .image.repository }}@{{ .image.digest }}{{- else -}}{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}{{- end -}}
{{- end }}
{{- define "agent-sandbox.namespaces" -}}
{{- $names := list }}{{- range .Values.sandboxNamespaces }}{{- $names = append $names .name }}{{- end }}{{ join "," $names }}
{{- end }}
{{- define "agent-sandbox.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "agent-sandbox.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- define "agent-sandbox.keysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" .Release.Name) }}
{{- end }}
