{{/* The daemon's configuration: what depends on the pod, and over it the user's. */}}
{{- define "perfusion.config" -}}
{{- $attach := dict "policy" (ternary "all" "off" .Values.attach.enabled) -}}
{{- $files := dict "directory" "/var/lib/perfusion/profiles" -}}
{{- $spool := dict "directory" "/var/lib/perfusion/spool" -}}
{{- $telemetry := dict "listen" "0.0.0.0:7071" -}}
{{- $kubernetes := dict "pods" (eq .Values.pods.source "api" | ternary "api" "logs") -}}
{{- $own := dict "files" $files "spool" $spool "attach" $attach "telemetry" $telemetry "kubernetes" $kubernetes -}}
{{- mustMergeOverwrite $own (deepCopy .Values.config) | toYaml }}
{{- end }}

{{/* The port of /metrics and /healthz; empty when nobody listens there, or only to the pod itself. */}}
{{- define "perfusion.port" -}}
{{- $listen := dig "telemetry" "listen" "" (include "perfusion.config" . | fromYaml) | default "" -}}
{{- if not (or (hasPrefix "127." $listen) (hasPrefix "[::1]" $listen)) }}{{ regexFind "[0-9]+$" $listen }}{{ end -}}
{{- end }}
