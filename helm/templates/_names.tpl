{{/* Names, labels and references that several templates share. */}}

{{- define "decodefleet.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 47 characters: KubeRay appends to the name of a RayService. */}}
{{- define "decodefleet.fullname" -}}
{{- $name := include "decodefleet.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "decodefleet.selector" -}}
app.kubernetes.io/name: {{ include "decodefleet.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "decodefleet.labels" -}}
{{ include "decodefleet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "decodefleet.image" -}}
{{- $image := .root.Values.image -}}
{{- $cpu := default (printf "%s-cpu" .root.Chart.AppVersion) $image.tag -}}
{{- $gpu := default (printf "%s-cuda" .root.Chart.AppVersion) $image.gpuTag -}}
{{- printf "%s:%s" $image.repository (ternary $gpu $cpu (eq .device "cuda")) -}}
{{- end -}}

{{/* The models with what modelDefaults says where they say nothing, as JSON: a list under `models`. */}}
{{- define "decodefleet.models" -}}
{{- $root := . -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $models = append $models (mergeOverwrite (deepCopy $root.Values.modelDefaults) (deepCopy .)) -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{- define "decodefleet.serviceAccount" -}}
{{- $values := .root.Values.serviceAccount -}}
{{- $name := default (include "decodefleet.fullname" .root) $values.name -}}
{{- ternary (printf "%s-head" $name) $name (eq .component "head") -}}
{{- end -}}

{{- define "decodefleet.secretName" -}}
{{- default (include "decodefleet.fullname" .) .Values.secrets.existingSecret -}}
{{- end -}}

{{- define "decodefleet.apiKeysName" -}}
{{- default (printf "%s-api-keys" (include "decodefleet.fullname" .)) .Values.apiKeys.existingSecret -}}
{{- end -}}

{{- define "decodefleet.redisAddress" -}}
{{- if .Values.redis.enabled -}}
{{- printf "%s-redis.%s.svc.%s:6379" (include "decodefleet.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- else -}}
{{- .Values.redis.external.address -}}
{{- end -}}
{{- end -}}

{{/* Where Ray keeps its state; an external address may say rediss:// itself. */}}
{{- define "decodefleet.rayStateUrl" -}}
{{- $address := include "decodefleet.redisAddress" . -}}
{{- ternary $address (printf "redis://%s" $address) (contains "://" $address) -}}
{{- end -}}

{{/* Seconds that a pod may take to end: preStop drains, and then Ray has to stop as well. */}}
{{- define "decodefleet.graceSeconds" -}}
{{- add .Values.drainSeconds .Values.unrouteSeconds 30 -}}
{{- end -}}

{{- define "decodefleet.scalesToZero" -}}
{{- $zero := false -}}
{{- range (include "decodefleet.models" . | fromJson).models -}}
{{- if and .autoscaling.enabled (eq (int .autoscaling.minReplicas) 0) -}}{{- $zero = true -}}{{- end -}}
{{- end -}}
{{- ternary "true" "" $zero -}}
{{- end -}}
