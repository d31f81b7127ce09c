{{- define "perfusion.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "perfusion.labels" -}}
{{ include "perfusion.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "perfusion.name" -}}
{{ contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "perfusion.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "perfusion.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "perfusion.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Named after its content: two versions of the chart can be on a node at once, during an update. */}}
{{- define "perfusion.seccomp" -}}
perfusion-{{ .Files.Get "files/seccomp.json" | sha256sum | trunc 12 }}.json
{{- end }}

{{/* What each is for: packaging/perfusion.service says it, too.
     BPF, PERFMON        the probes, and the timer of the samples
     SYS_PTRACE          /proc/PID of other users
     CHECKPOINT_RESTORE  /proc/PID/map_files: the files a process really has mapped
     DAC_READ_SEARCH     files of other users, read
     SYSLOG              addresses in /proc/kallsyms
     SYS_RESOURCE        memory of maps on kernels before 5.11
     IPC_LOCK            memory of perf's rings
     DAC_OVERRIDE        the diagnostics socket of another user's .NET process: attach only, and held by a helper process, not by the daemon
     SYS_ADMIN           perf_event_open, where Debian's and Ubuntu's kernels keep it from PERFMON: sysAdmin only */}}
{{- define "perfusion.capabilities" -}}
{{- $all := list "BPF" "PERFMON" "SYS_PTRACE" "CHECKPOINT_RESTORE" "DAC_READ_SEARCH" "SYSLOG" "SYS_RESOURCE" "IPC_LOCK" -}}
{{- if .Values.attach.enabled }}{{ $all = append $all "DAC_OVERRIDE" }}{{ end -}}
{{- if .Values.sysAdmin }}{{ $all = append $all "SYS_ADMIN" }}{{ end -}}
{{ toJson $all }}
{{- end }}
