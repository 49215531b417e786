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
{{- /* What the pods of all three components have in common. */ -}}
{{- define "agent-sandbox.pod" -}}
serviceAccountName: {{ include "agent-sandbox.name" . }}
enableServiceLinks: false
securityContext: {{- include "agent-sandbox.podSecurity" .root | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}
{{- define "agent-sandbox.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "agent-sandbox.selector" . | nindent 8 }}
{{- end }}
{{- define "agent-sandbox.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  initialDelaySeconds: 10
  periodSeconds: 15
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}}
  periodSeconds: 3
  timeoutSeconds: 5
{{- end }}
{{- define "agent-sandbox.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "agent-sandbox.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "agent-sandbox.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "agent-sandbox.selector" . | nindent 6 }}
{{- end }}
{{- define "agent-sandbox.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "agent-sandbox.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "agent-sandbox.labels" .root | nindent 4 }}
{{- end }}
