{{/* The daemon's configuration: what depends on the pod, and over it the user's. */}}
{{- define "perfusion.config" -}}
{{- $attach := dict "policy" (ternary "all" "off" .Values.attach.enabled) -}}
{{- $files := dict "directory" "/var/lib/perfusion/profiles" -}}
{{- $spool := dict "directory" "/var/lib/perfusion/spool" -}}
{{- $own := dict "files" $files "spool" $spool "attach" $attach -}}
{{- mustMergeOverwrite $own (deepCopy .Values.config) | toYaml }}
{{- end }}
