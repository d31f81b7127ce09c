{{/* The daemon's configuration: what depends on the pod, and over it the user's. */}}
{{- define "perfusion.config" -}}
{{- $attach := dict "policy" (ternary "all" "off" .Values.attach.enabled) -}}
{{- $files := dict "directory" "/var/lib/perfusion/profiles" -}}
{{- $spool := dict "directory" "/var/lib/perfusion/spool" -}}
{{- $telemetry := dict "listen" "0.0.0.0:7071" -}}
{{- $pods := eq .Values.pods.source "api" | ternary "api" "logs" -}}
{{- $own := dict "files" $files "spool" $spool "attach" $attach "telemetry" $telemetry "kubernetes" (dict "pods" $pods) -}}
{{- $config := mustMergeOverwrite $own (deepCopy .Values.config) -}}
{{- /* The pod has its capabilities, mounts and rights by these values alone. */ -}}
{{- if ne .Values.attach.enabled (ne $config.attach.policy "off") -}}
{{- fail (printf "config.attach.policy is %s, and attach.enabled %t: the pod has the capability to attach by attach.enabled alone; let both say the same, or leave config.attach.policy out" $config.attach.policy .Values.attach.enabled) -}}
{{- end -}}
{{- if ne $config.kubernetes.pods $pods -}}
{{- fail (printf "config.kubernetes.pods is %s, and pods.source %s: the pod has token, rights and directories by pods.source alone; leave config.kubernetes.pods out" $config.kubernetes.pods .Values.pods.source) -}}
{{- end -}}
{{- if not .Values.storage.hostPath }}{{ include "perfusion.fit" (dict "config" $config "limit" .Values.storage.sizeLimit) }}{{ end -}}
{{- $config | toYaml }}
{{- end }}

{{/* Without a directory of the node the kubelet evicts a pod that keeps more than storage.sizeLimit. What is not said is derived from it: half for files (three
quarters when nobody is sent anything), a quarter for the spools of all receivers, never more than the daemon's defaults; the last quarter is for what
files take beyond their length. What is said must fit. */}}
{{- define "perfusion.fit" -}}
{{- $mebibyte := 1048576 -}}
{{- $limit := include "perfusion.bytes" .limit | int64 -}}
{{- $c := .config -}}
{{- $receivers := add (len ($c.otlp | default list)) (len ($c.pyroscope | default list)) (len ($c.s3 | default list)) | int64 -}}
{{- $here := "/var/lib/perfusion/" -}}
{{- $files := hasPrefix $here (dig "directory" "" ($c.files | default dict) | default "") -}}
{{- $spools := and (gt $receivers 0) (hasPrefix $here (dig "directory" "" ($c.spool | default dict) | default "")) -}}
{{- if and $files (not (hasKey $c.files "max_size")) -}}
{{- $part := ternary (div $limit 2) (div (mul $limit 3) 4) $spools -}}
{{- $_ := set $c.files "max_size" (printf "%dMiB" (div (min $part 2147483648) $mebibyte)) -}}
{{- end -}}
{{- if and $spools (not (hasKey $c.spool "max_size")) -}}
{{- $_ := set $c.spool "max_size" (printf "%dMiB" (div (min (div $limit (mul 4 $receivers)) 536870912) $mebibyte)) -}}
{{- end -}}
{{- $all := 0 -}}
{{- if $files }}{{ $all = include "perfusion.bytes" $c.files.max_size | int64 }}{{ end -}}
{{- if $spools }}{{ $all = add $all (mul $receivers (include "perfusion.bytes" $c.spool.max_size | int64)) }}{{ end -}}
{{- if gt $all $limit -}}
{{- fail (printf "config.files.max_size and config.spool.max_size of each of %d receivers are %d MiB together, more than storage.sizeLimit (%s): the kubelet would evict the pod" $receivers (div $all $mebibyte) .limit) -}}
{{- end -}}
{{- end }}

{{/* A size as Kubernetes or the daemon writes it, in bytes. 0 for what is none, which the daemon says. */}}
{{- define "perfusion.bytes" -}}
{{- if kindIs "string" . -}}
{{- $unit := regexFind "[A-Za-z]*$" . | lower | trimSuffix "b" -}}
{{- $units := dict "" 1 "k" 1000 "m" 1000000 "g" 1000000000 "t" 1000000000000 "ki" 1024 "mi" 1048576 "gi" 1073741824 "ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" . | default "0" | float64) (get $units $unit | default 0 | float64) | floor | int64 -}}
{{- else -}}
{{- int64 . -}}
{{- end -}}
{{- end }}

{{/* The port of /metrics and /healthz; empty when nobody listens there, or only to the pod itself. */}}
{{- define "perfusion.port" -}}
{{- $listen := dig "telemetry" "listen" "" (include "perfusion.config" . | fromYaml) | default "" -}}
{{- if not (or (hasPrefix "127." $listen) (hasPrefix "[::1]" $listen)) }}{{ regexFind "[0-9]+$" $listen }}{{ end -}}
{{- end }}
