{{/* What an installation says; named, so that a test can render it without a cluster. */}}
{{- define "perfusion.notes" -}}
Perfusion {{ .Chart.AppVersion }} profiles every node that its DaemonSet `{{ include "perfusion.name" . }}` in namespace `{{ .Release.Namespace }}` runs on.

    kubectl -n {{ .Release.Namespace }} rollout status daemonset/{{ include "perfusion.name" . }}
    kubectl -n {{ .Release.Namespace }} exec daemonset/{{ include "perfusion.name" . }} -- perfusion doctor
    kubectl -n {{ .Release.Namespace }} exec daemonset/{{ include "perfusion.name" . }} -- perfusion ps

Please note:
- Its pods see all processes of their node (hostPID) and have the capabilities{{ range include "perfusion.capabilities" . | fromJsonArray }} {{ . }}{{ end }}. A namespace
  with Pod Security admission refuses them until it has this label:
      kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=privileged
- GKE Autopilot, EKS Fargate and virtual nodes refuse such pods altogether.
{{- if not (or .Values.config.otlp .Values.config.pyroscope) }}
- WARNING: no receiver is configured: profiles stay on each node, in {{ .Values.storage.hostPath | default "a volume of the pod" }}. See `config` in the chart's values.
{{- end }}
{{- if not .Values.storage.hostPath }}
- WARNING: storage.hostPath is empty: profiles and what waits to be sent go with their pod.
{{- end }}
{{- if .Values.attach.enabled }}
- attach.enabled: a library of 80 KB is loaded into .NET processes, which takes DAC_OVERRIDE.
{{- else }}
- WARNING: attach.enabled is false: .NET methods have no names, and there are no allocations and live objects.
{{- end }}
{{- if eq .Values.seccomp.type "Unconfined" }}
- WARNING: seccomp.type is Unconfined: every system call is allowed.
{{- else if eq .Values.seccomp.type "RuntimeDefault" }}
- seccomp.type is RuntimeDefault: runtimes older than containerd 1.7 or CRI-O 1.25 refuse bpf() and perf_event_open() there; `perfusion doctor` tells.
{{- end }}
{{- if eq .Values.image.repository "perfusion" }}
- WARNING: image.repository is the placeholder `perfusion`: build the image from the Dockerfile, push it, and say where it is.
{{- end }}
{{- end }}
