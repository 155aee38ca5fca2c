{{/*
What Ray Serve is told: one application per model. Options go by the flat names of `decodefleet serve`.
Takes the root context.
*/}}

{{- define "decodefleet.serveConfig" -}}
{{- $root := . -}}
{{- $models := (include "decodefleet.models" . | fromJson).models -}}
proxy_location: EveryNode
http_options: { host: 0.0.0.0, port: 8000 }
applications:
  {{- range $models }}
  - name: {{ .name }}
    route_prefix: {{ .route }}
    import_path: decodefleet.cluster.app:build
    args:
      {{- include "decodefleet.options" (dict "root" $root "model" .) | nindent 6 }}
    deployments:
      - name: scheduler
        ray_actor_options: { num_cpus: 0, label_selector: { decodefleet.io/component: router } }
      - name: router
        ray_actor_options: { num_cpus: {{ include "decodefleet.routerShare" $root }}, label_selector: { decodefleet.io/component: router } }
        {{- include "decodefleet.scaling" $root.Values.router | nindent 8 }}
      - name: worker
        # what the application says itself; Serve takes the selector only beside it
        placement_group_bundles: [{ CPU: 1{{ if eq .device "cuda" }}, GPU: {{ .tensorParallelSize }}{{ end }} }]
        placement_group_bundle_label_selector: [{ decodefleet.io/model: {{ .name }} }]
        {{- include "decodefleet.scaling" . | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* Each router pod has one CPU for Ray, divided between the routers of all models. */}}
{{- define "decodefleet.routerShare" -}}
{{- divf 1 (len .Values.models) -}}
{{- end -}}

{{/*
Fixed numbers stand here and not among the options, whose change replaces every replica. Numbers that follow the
load are set up by the application itself, from its options: Serve's own policy sees no requests of workers.
*/}}
{{- define "decodefleet.scaling" -}}
{{- if not .autoscaling.enabled -}}
num_replicas: {{ .replicas }}
{{- end -}}
{{- end -}}

{{- define "decodefleet.options" -}}
{{- $values := .root.Values -}}
{{- $model := .model -}}
{{- $options := dict
  "model" $model.model
  "served_model_name" (default $model.name $model.servedModelName)
  "address" "auto"
  "drain_s" $values.drainSeconds
  "log_level" $values.logLevel
  "metrics_port" 9400
  "device" $model.device
  "tensor_parallel_size" (int $model.tensorParallelSize)
-}}
{{- with $model.autoscaling }}
  {{- if .enabled }}{{ $_ := set $options "min_workers" (int .minReplicas) }}{{ $_ := set $options "max_workers" (int .maxReplicas) }}{{ end -}}
{{- end -}}
{{- with $values.router.autoscaling }}
  {{- if .enabled }}{{ $_ := set $options "routers" (int .minReplicas) }}{{ $_ := set $options "max_routers" (int .maxReplicas) }}{{ end -}}
{{- end -}}
{{- with $model.revision }}{{ $_ := set $options "revision" . }}{{ end -}}
{{- if $values.apiKeys.enabled }}{{ $_ := set $options "api_key_file" "/etc/decodefleet/api-keys/keys" }}{{ end -}}
{{- if $model.nvme.enabled }}{{ $_ := set $options "nvme_kv_path" "/nvme" }}{{ end -}}
{{ toYaml (mergeOverwrite $options (deepCopy $model.options)) }}
{{- end -}}
