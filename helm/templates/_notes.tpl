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
{{- if not .Values.sysAdmin }}
- sysAdmin is false: nodes with Debian's or Ubuntu's kernel refuse to be sampled unless their kernel.perf_event_paranoid is set to 2; `perfusion doctor` tells.
- sysAdmin is false: the kernel counts the probes' CPU time on nodes with kernel.bpf_stats_enabled=1 only; on others it is in no metric, and config.limits.cpu
  is of the daemon alone; `perfusion doctor` tells.
{{- end }}
{{- if not (or .Values.config.otlp .Values.config.pyroscope .Values.config.s3) }}
- WARNING: no receiver is configured: profiles stay on each node, in {{ .Values.storage.hostPath | default "a volume of the pod" }}. See `config` in the chart's values.
{{- end }}
{{- if not .Values.storage.hostPath }}
- WARNING: storage.hostPath is empty: profiles and what waits to be sent go with their pod, which may keep {{ .Values.storage.sizeLimit }}.
{{- end }}
{{- if .Values.attach.enabled }}
- attach.enabled: a library of 130 KB is loaded into .NET processes, which takes DAC_OVERRIDE.
{{- else }}
- WARNING: attach.enabled is false: .NET methods have no names, and there are no allocations and live objects.
{{- end }}
{{- if eq .Values.pods.source "api" }}
- pods.source is api: pods are recorded once the API server has told of them, and none whose annotation perfusion/profile is "off".
{{- if not .Values.rbac.create }}
- WARNING: rbac.create is false: the service account {{ include "perfusion.serviceAccount" . }} needs to list and watch pods by other rights, or no pod is recorded.
{{- end }}
{{- else if eq .Values.pods.source "logs" }}
- WARNING: pods.source is logs: annotations are not seen, so no pod can opt out: those that want no profile are recorded{{ if .Values.attach.enabled }}, and attached to{{ end }}.
{{- else }}
- WARNING: pods.source is none: samples do not say which pod they are of, and no pod can opt out.
{{- end }}
{{- if eq .Values.seccomp.type "Unconfined" }}
- WARNING: seccomp.type is Unconfined: every system call is allowed.
{{- else if eq .Values.seccomp.type "RuntimeDefault" }}
- seccomp.type is RuntimeDefault: runtimes older than containerd 1.7 or CRI-O 1.25 refuse bpf() and perf_event_open() there; `perfusion doctor` tells.
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) }}
- WARNING: networkPolicy.metricsFrom is empty: the policy keeps Prometheus from the /metrics that podMonitor.enabled has it ask for.
{{- end }}
{{- if eq .Values.image.repository "perfusion" }}
- WARNING: image.repository is the placeholder `perfusion`: build the image from the Dockerfile, push it, and say where it is.
{{- end }}
{{- end }}
