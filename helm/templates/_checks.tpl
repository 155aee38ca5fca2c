{{/* What a schema cannot say of the values. Renders nothing. */}}

{{- define "decodefleet.groupSize" -}}
{{- if .autoscaling.enabled -}}
replicas: {{ .autoscaling.minReplicas }}
minReplicas: {{ .autoscaling.minReplicas }}
maxReplicas: {{ .autoscaling.maxReplicas }}
{{- else -}}
replicas: {{ .replicas }}
minReplicas: {{ .replicas }}
maxReplicas: {{ .replicas }}
{{- end -}}
{{- end -}}

{{- define "decodefleet.check" -}}
{{- $values := .Values -}}
{{- $models := (include "decodefleet.models" . | fromJson).models -}}
{{- $names := list "routers" -}}
{{- $routes := list -}}
{{- range $models -}}
  {{- if has .name $names }}{{ fail (printf "models: the name %s is taken; each model needs one of its own" .name) }}{{ end -}}
  {{- if has .route $routes }}{{ fail (printf "models: two models have the route %s; give each its own" .route) }}{{ end -}}
  {{- $names = append $names .name -}}
  {{- $routes = append $routes .route -}}
  {{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) }}{{ fail (printf "models.%s.autoscaling: minReplicas is above maxReplicas" .name) }}{{ end -}}
  {{- if and .autoscaling.enabled (not $values.ray.autoscaler.enabled) }}{{ fail (printf "models.%s.autoscaling: needs ray.autoscaler.enabled" .name) }}{{ end -}}
  {{- if hasKey .options "ssl_certfile" }}{{ fail (printf "models.%s.options.ssl_certfile: pods speak HTTP; end TLS at ingress.tls, or at the gateway of httpRoute" .name) }}{{ end -}}
{{- end -}}
{{- with $values.router.autoscaling }}{{ if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}{{ fail "router.autoscaling: minReplicas is above maxReplicas" }}{{ end }}{{ end -}}
{{- if and $values.router.autoscaling.enabled (not $values.ray.autoscaler.enabled) }}{{ fail "router.autoscaling: needs ray.autoscaler.enabled" }}{{ end -}}
{{- if and (not $values.redis.enabled) (not $values.redis.external.urlSecret.name) }}{{ fail "redis.external.urlSecret.name: needed where redis.enabled is false" }}{{ end -}}
{{- if and $values.ray.gcsFaultTolerance (not (include "decodefleet.redisAddress" .)) }}{{ fail "redis.external.address: needed for ray.gcsFaultTolerance where redis.enabled is false" }}{{ end -}}
{{- with $values.ray.upgrade -}}
  {{- if eq .type "NewClusterWithIncrementalUpgrade" -}}
    {{- if not .gatewayClassName }}{{ fail "ray.upgrade.gatewayClassName: needed for NewClusterWithIncrementalUpgrade" }}{{ end -}}
    {{- if not $values.ray.autoscaler.enabled }}{{ fail "ray.upgrade.type: NewClusterWithIncrementalUpgrade needs ray.autoscaler.enabled" }}{{ end -}}
    {{- if gt (int .stepSizePercent) (int .maxSurgePercent) }}{{ fail "ray.upgrade.stepSizePercent: must not exceed maxSurgePercent" }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
