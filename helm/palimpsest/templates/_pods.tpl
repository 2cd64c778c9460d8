{{/* Environment of every container that runs Palimpsest. Secrets are referred to, never written. */}}
{{- define "palimpsest.env" -}}
{{- $auth := .Values.auth -}}
{{- $secret := include "palimpsest.fullname" . -}}
- {name: HOME, value: /var/lib/palimpsest}
- {name: HF_HOME, value: /models/huggingface}
{{- if .Values.models.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if or $auth.huggingFace.existingSecret $auth.huggingFace.token }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ default $secret $auth.huggingFace.existingSecret }}, key: token}}
{{- end }}
{{- end -}}

{{- define "palimpsest.keysEnv" -}}
{{- $auth := .Values.auth -}}
{{- $secret := include "palimpsest.fullname" . -}}
{{- if not $auth.allowAnonymous }}
- name: PALIMPSEST_API_KEYS
  valueFrom: {secretKeyRef: {name: {{ default $secret $auth.apiKeys.existingSecret }}, key: api-keys}}
{{- end }}
{{- if or $auth.adminKey.existingSecret $auth.adminKey.value }}
- name: PALIMPSEST_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ default $secret $auth.adminKey.existingSecret }}, key: admin-key}}
{{- end }}
{{- end -}}

{{/* Ray reads these on every node: the head decides, and all of them run Serve's processes. */}}
{{- define "palimpsest.rayEnv" -}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "cluster.listening:middlewares"}
# A dead proxy is missed after seconds instead of half a minute.
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "1.5"}
# What still streams when HAProxy is told of other replicas, and is then told that its time is over.
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ add 10 (include "palimpsest.drainSeconds" . | int) | quote }}}
# At its end a pod is taken out of Serve's sight, after its streams (see preStop).
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "10"}
{{- with .Values.ray.healthCheck }}
- {name: RAY_health_check_initial_delay_ms, value: {{ mul 1000 (int .periodSeconds) | quote }}}
- {name: RAY_health_check_period_ms, value: {{ mul 1000 (int .periodSeconds) | quote }}}
- {name: RAY_health_check_timeout_ms, value: {{ mul 1000 (int .timeoutSeconds) | quote }}}
- {name: RAY_health_check_failure_threshold, value: {{ .failureThreshold | quote }}}
{{- end }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: MALLOC_ARENA_MAX, value: "2"}
{{- if eq .Values.auth.ray.mode "disabled" }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- end -}}

{{/* The ports that Ray would draw by chance, so that networkpolicy.yaml can name them. */}}
{{- define "palimpsest.rayStartParams" -}}
object-store-memory: {{ int64 .Values.ray.objectStoreMemory | quote }}
node-manager-port: "6380"
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "19999"
{{- end -}}

{{- define "palimpsest.podMetadata" -}}
labels:
  {{- include "palimpsest.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .group.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  # Containers read keys when they start.
  palimpsest/keys: {{ toJson .root.Values.auth | sha256sum | trunc 16 }}
  {{- with .group.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "palimpsest.podSpec" -}}
serviceAccountName: {{ include "palimpsest.serviceAccount" .root }}
automountServiceAccountToken: {{ and .root.Values.autoscaling.enabled (eq .component "head") }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
  {{- if .root.Values.networkPolicy.enabled }}
  # The ports that Gloo and NCCL listen on, as networkpolicy.yaml has them.
  sysctls: [{name: net.ipv4.ip_local_port_range, value: 32768 60999}]
  {{- end }}
{{- with .group.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.group $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of each container: what it may write to, as its own files are read-only. */}}
{{- define "palimpsest.mounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/palimpsest}
{{- end -}}

{{- define "palimpsest.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- end -}}

{{/* Models lie in the volume: those of the hub in huggingface/, those of packages in palimpsest/. */}}
{{- define "palimpsest.modelMounts" -}}
- {name: models, mountPath: /models, readOnly: {{ .Values.models.readOnly }}}
{{- if not .Values.models.readOnly }}
- {name: models, mountPath: /var/lib/palimpsest/.cache/palimpsest/models, subPath: palimpsest}
{{- end }}
{{- end -}}

{{- define "palimpsest.modelVolume" -}}
- name: models
{{- with .Values.models }}
{{- if eq .volume "pvc" }}
  persistentVolumeClaim: {claimName: {{ include "palimpsest.modelClaim" $ }}, readOnly: {{ .readOnly }}}
{{- else if eq .volume "hostPath" }}
  hostPath: {path: {{ .hostPath }}, type: Directory}
{{- else }}
  emptyDir: {sizeLimit: {{ .size }}}
{{- end }}
{{- end }}
{{- end -}}
