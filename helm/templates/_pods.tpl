{{/*
The pods of a Ray cluster. All templates take a dict: root, component (head, router or worker), group (its
part of the values), device, and for workers model. KubeRay adds `ray start`, /dev/shm where we give none,
the autoscaler beside the head, and the wait for the head in the others.
*/}}

{{- define "decodefleet.podLabels" -}}
{{ include "decodefleet.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
decodefleet.io/model: {{ .name }}
{{- end }}
{{- with .group.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "decodefleet.podTemplate" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "decodefleet.podLabels" . | nindent 4 }}
  {{- with .group.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "decodefleet.serviceAccount" . }}
  # the autoscaler beside the head asks the API server for pods; nobody else does
  automountServiceAccountToken: {{ and (eq .component "head") $values.ray.autoscaler.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "decodefleet.graceSeconds" .root }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $selector := include "decodefleet.podLabels" (dict "root" $.root "component" $.component "model" $.model "group" dict) | fromYaml }}
    {{- range . }}
    - {{ toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $selector))) | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ .component }}
      image: {{ include "decodefleet.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- toYaml $values.securityContext | nindent 8 }}
      ports:
        {{- include "decodefleet.ports" . | nindent 8 }}
      env:
        {{- include "decodefleet.env" . | nindent 8 }}
      resources:
        {{- include "decodefleet.resources" . | nindent 8 }}
      {{- include "decodefleet.probes" . | nindent 6 }}
      {{- if ne .component "head" }}
      lifecycle:
        preStop:
          exec:
            # endpoints first forget the pod; then its replicas move elsewhere and its streams end
            command: [decodefleet, drain-node, --unroute-s, {{ $values.unrouteSeconds | quote }}, --limit-s, {{ $values.drainSeconds | quote }}]
      {{- end }}
      volumeMounts:
        {{- include "decodefleet.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "decodefleet.volumes" . | nindent 4 }}
{{- end -}}

{{- define "decodefleet.ports" -}}
- { name: serve, containerPort: 8000 }
- { name: metrics, containerPort: 8080 }
- { name: proxy-metrics, containerPort: 9101 }
{{- if .model }}
- { name: worker-metrics, containerPort: 9400 }
{{- end }}
{{- if eq .component "head" }}
- { name: gcs-server, containerPort: 6379 }
- { name: dashboard, containerPort: 8265 }
{{- end }}
{{- end -}}

{{- define "decodefleet.env" -}}
{{- $values := .root.Values -}}
{{- $secret := include "decodefleet.secretName" .root -}}
- { name: HOME, value: /tmp }
- { name: XDG_CACHE_HOME, value: /tmp/cache }
- { name: DECODEFLEET_CACHE, value: {{ $values.modelCache.mountPath }} }
- { name: HF_HOME, value: {{ $values.modelCache.mountPath }}/huggingface }
- { name: TRITON_CACHE_DIR, value: {{ $values.modelCache.mountPath }}/triton }
{{- if $values.huggingFace.offline }}
- { name: HF_HUB_OFFLINE, value: "1" }
{{- end }}
{{- with ternary "" $values.huggingFace.existingSecret (eq .component "head") }}
- { name: HF_TOKEN, valueFrom: { secretKeyRef: { name: {{ . }}, key: {{ $values.huggingFace.key }} } } }
{{- end }}
{{- if not $values.ray.auth }}
# Ray would make tokens of its own on each node
- { name: RAY_AUTH_MODE, value: disabled }
{{- end }}
- { name: RAY_SERVE_HAPROXY_NBTHREAD, value: {{ ternary $values.router.proxyThreads 1 (eq .component "router") | quote }} }
- { name: RAY_SERVE_HAPROXY_MAXCONN, value: {{ $values.router.maxConnections | quote }} }
- { name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: {{ $values.unrouteSeconds | quote }} }
- { name: RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S, value: {{ $values.unrouteSeconds | quote }} }
- { name: DECODEFLEET_CLUSTER_SECRET, valueFrom: { secretKeyRef: { name: {{ $secret }}, key: cluster-secret } } }
{{- if $values.redis.enabled }}
- { name: DIRECTORY_REDIS_PASSWORD, valueFrom: { secretKeyRef: { name: {{ $secret }}, key: redis-password } } }
- { name: DECODEFLEET_REDIS_URL, value: "redis://:$(DIRECTORY_REDIS_PASSWORD)@{{ include "decodefleet.redisAddress" .root }}/1" }
{{- else }}
{{- with $values.redis.external.urlSecret }}
- { name: DECODEFLEET_REDIS_URL, valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } } }
{{- end }}
{{- end }}
{{- with .group.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "decodefleet.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- if eq .device "cuda" -}}
{{- $gpus := dict .group.gpuResource (.group.tensorParallelSize | int) -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $gpus) -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $gpus) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/*
Liveness is of Ray on the node and nothing else: a replica that loads, compiles or is busy never fails it. A
router pod counts as started when a worker can generate (where models may scale to zero: when the router
answers), and as ready while its proxy has a router to send requests to. A worker pod is ready while its worker can
generate: budgets count ready pods, and one whose model is still loading must not stand for one that serves.
TLS ends before the pods, so that nothing here speaks it.
*/}}
{{- define "decodefleet.probes" -}}
{{- $node := dict "path" "/api/healthz" "port" 52365 -}}
livenessProbe:
  httpGet:
    {{- toYaml $node | nindent 4 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- if eq .component "router" }}
startupProbe:
  httpGet: { path: {{ include "decodefleet.startedPath" .root }}, port: serve }
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .group.startupLimitSeconds 4) 5 }}
readinessProbe:
  httpGet: { path: /-/healthz, port: serve }
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- else }}
startupProbe:
  httpGet:
    {{- toYaml $node | nindent 4 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet:
    {{- toYaml (ternary (dict "path" "/ready" "port" "worker-metrics") $node (eq .component "worker")) | nindent 4 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}
{{- end -}}

{{- define "decodefleet.startedPath" -}}
{{- $first := first (include "decodefleet.models" . | fromJson).models -}}
{{- ternary "/-/healthz" (printf "%s/ready" (trimSuffix "/" $first.route)) (ne (include "decodefleet.scalesToZero" .) "") -}}
{{- end -}}

{{- define "decodefleet.volumeMounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: shared-mem, mountPath: /dev/shm }
{{- if ne .component "head" }}
- { name: model-cache, mountPath: {{ .root.Values.modelCache.mountPath }} }
{{- end }}
{{- if and (eq .component "router") .root.Values.apiKeys.enabled }}
- { name: api-keys, mountPath: /etc/decodefleet/api-keys, readOnly: true }
{{- end }}
{{- if and .model .group.nvme.enabled }}
- { name: nvme, mountPath: /nvme }
{{- end }}
{{- with .group.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "decodefleet.volumes" -}}
{{- $values := .root.Values -}}
- { name: tmp, emptyDir: {} }
- { name: shared-mem, emptyDir: { medium: Memory, sizeLimit: {{ .group.sharedMemory }} } }
{{- if ne .component "head" }}
- name: model-cache
  {{- if eq $values.modelCache.type "persistentVolumeClaim" }}
  persistentVolumeClaim: { claimName: {{ default (printf "%s-models" (include "decodefleet.fullname" .root)) $values.modelCache.existingClaim }} }
  {{- else if eq $values.modelCache.type "hostPath" }}
  hostPath: { path: {{ required "modelCache.hostPath: needed with type hostPath" $values.modelCache.hostPath }}, type: DirectoryOrCreate }
  {{- else }}
  emptyDir: { sizeLimit: {{ $values.modelCache.size }} }
  {{- end }}
{{- end }}
{{- if and (eq .component "router") $values.apiKeys.enabled }}
- name: api-keys
  secret:
    secretName: {{ include "decodefleet.apiKeysName" .root }}
    items: [{ key: keys, path: keys }]
    defaultMode: 0440
{{- end }}
{{- if and .model .group.nvme.enabled }}
- name: nvme
  {{- if .group.nvme.hostPath }}
  hostPath: { path: {{ .group.nvme.hostPath }}, type: DirectoryOrCreate }
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .group.nvme.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: { requests: { storage: {{ .group.nvme.size }} } }
  {{- end }}
{{- end }}
{{- with .group.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
