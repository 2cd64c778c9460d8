{{- define "palimpsest.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay puts six characters behind it for the cluster, and Kubernetes ten more for services. */}}
{{- define "palimpsest.fullname" -}}
{{- $name := include "palimpsest.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "The name %q cannot be that of a service: begin with a letter, and use a-z, 0-9 and - only." $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* What tells this release's pods from all others; with `component` from each other. */}}
{{- define "palimpsest.selector" -}}
app.kubernetes.io/name: {{ include "palimpsest.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "palimpsest.labels" -}}
{{ include "palimpsest.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "palimpsest.image" -}}
{{- $device := ternary "cuda" "cpu" (gt (int .Values.workers.gpusPerNode) 0) -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion $device) .Values.image.tag -}}
{{- $at := ternary (printf "@%s" .Values.image.digest) "" (ne .Values.image.digest "") -}}
{{- printf "%s:%s%s" .Values.image.repository $tag $at -}}
{{- end -}}

{{- define "palimpsest.serviceAccount" -}}
{{- default (ternary (include "palimpsest.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "palimpsest.modelClaim" -}}
{{- default (printf "%s-models" (include "palimpsest.fullname" .)) .Values.models.claim.existing -}}
{{- end -}}

{{/* The settings as Palimpsest reads them: those of `config`, and those that Kubernetes decides. */}}
{{- define "palimpsest.config" -}}
{{- $device := ternary "cuda" "cpu" (gt (int .Values.workers.gpusPerNode) 0) -}}
{{- $pods := mul (include "palimpsest.groups" . | int) (include "palimpsest.shape" . | fromYaml).pods -}}
{{- $server := dict "host" "0.0.0.0" "port" 8000 "allow_no_auth" .Values.auth.allowAnonymous "num_replicas" (default $pods .Values.http.replicas) -}}
{{- $decided := dict "parallel" (dict "device" $device) "server" $server -}}
{{- mergeOverwrite (deepCopy .Values.config) $decided | toYaml -}}
{{- end -}}

{{- define "palimpsest.groups" -}}
{{- ternary .Values.autoscaling.minGroups 1 .Values.autoscaling.enabled -}}
{{- end -}}

{{/* Pods of one group of TP x PP ranks, and GPUs of each: TP inside a pod, stages over pods. */}}
{{- define "palimpsest.shape" -}}
{{- $parallel := default dict .Values.config.parallel -}}
{{- $tp := int (default 1 $parallel.tensor_parallel_size) -}}
{{- $pp := int (default 1 $parallel.pipeline_parallel_size) -}}
{{- $node := int .Values.workers.gpusPerNode -}}
{{- if and $node (gt $tp $node) -}}
{{- fail (printf "config.parallel.tensor_parallel_size is %d, but a node has %d GPUs (workers.gpusPerNode): tensor-parallel ranks share a node, so lower it, and raise config.parallel.pipeline_parallel_size instead." $tp $node) -}}
{{- end -}}
{{- $stages := $pp -}}
{{- if $node -}}{{- $stages = min $pp (div $node $tp) -}}{{- end -}}
pods: {{ div (add $pp (sub $stages 1)) $stages }}
gpus: {{ ternary (mul $tp $stages) 0 (gt $node 0) }}
name: {{ printf "tp%d-pp%d" $tp $pp }}
{{- end -}}

{{- define "palimpsest.drainSeconds" -}}
{{- int (ceil .Values.config.server.drain_seconds) -}}
{{- end -}}
