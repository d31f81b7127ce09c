//! The chart's pod, without a kubelet: its containers as `helm template` renders them become
//! bundles of an OCI runtime (crun), with the pod's capabilities, list of system calls, read-only
//! root, user, mounts and limits, in a Debian that is really booted.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{PROFILED, Trial, Verdicts, has, write};
use crate::{
    exec::{StepLog, output},
    helm, image,
    paths::WorkspacePaths,
};

/// Its CPU time is emulated, so that the usual limit would lower the rates; windows are short, so
/// that it does not take for ever.
const VALUES: &str = r#"
attach: { enabled: true }
pods: { source: logs }
config: { windows: { length: 10s, aligned: false }, limits: { cpu: 100% } }
"#;
/// Where the machine has what the kubelet would make: volumes, and the containers' bundles.
const VOLUMES: &str = "/opt/check/volumes";
const NODE: &str = "node-1";
/// In the order of the pod: those of `initContainers`, then its own.
const BUNDLES: [&str; 2] = ["seccomp", "perfusion"];

pub(super) const TRIAL: Trial =
    Trial { name: "pod", packages: &["crun"], kernel_words: "", script: SCRIPT, fill, judge };

const SCRIPT: &str = r#"
PERFUSION=/opt/check/perfusion/rootfs/usr/bin/perfusion
# Debian's kernels keep perf_event_open from CAP_PERFMON above 2: docs/deployment.md.
echo 2 > /proc/sys/kernel/perf_event_paranoid
mkdir -p /var/lib/perfusion /var/log/pods /var/lib/kubelet/seccomp /opt/check/volumes/run
mount -t tmpfs -o size=1m,mode=1777 run /opt/check/volumes/run

say init; crun run --bundle /opt/check/seccomp seccomp 2>&1; say "exit $?"
say profile
  cmp /opt/check/volumes/config/seccomp.json \
    /var/lib/kubelet/seccomp/"$(cat /opt/check/profile)" 2>&1; say "exit $?"

# Pods beside it: a cgroup as the kubelet names it, and a directory for the logs.
in_pod() {
local name=$1 uid=$2 container=$3; shift 3
local group=/sys/fs/cgroup/kubepods/burstable/pod$uid/$container
mkdir -p "$group" "/var/log/pods/shop_${name}_$uid/main"
( echo $BASHPID > "$group/cgroup.procs"; "$@" )
}
in_pod chain-0 11111111-2222-3333-4444-555555555555 1111111111111111111111111111111111111111111111111111111111111111 native &
in_pod load-0 66666666-7777-8888-9999-000000000000 2222222222222222222222222222222222222222222222222222222222222222 managed &

crun run --pid-file /tmp/pid --bundle /opt/check/perfusion perfusion > /tmp/said 2>&1 & runner=$!
started() { [ -s /tmp/pid ]; }
until_true started; pid=$(cat /tmp/pid)
get() { nsenter --net=/proc/$pid/ns/net bash -c 'exec 3<> /dev/tcp/127.0.0.1/7071 &&
  printf "GET %s HTTP/1.0\r\n\r\n" "$0" >&3 && cat <&3' "$1" 2> /dev/null; }
answers() { get "$1" | head -1 | grep -q ' 200 '; }
at_least() { local value; value=$(get /metrics | grep "^perfusion_$1 " | cut -d' ' -f2)
  [ "${value%.*}" -ge "$2" ] 2> /dev/null; }
why() { cat /tmp/said /tmp/load; $PERFUSION ps 2>&1 | head -20; for type in cpu blocked alloc_space
  do report $type | grep -v chain | cut -c 1-600 | tail -3; done; }
say ready; until_true answers /readyz; code=$?; [ $code = 0 ] || why; say "exit $code"
say alive; answers /healthz; say "exit $?"
say confined; for task in /proc/$pid/task/*
  do grep -E '^(Uid|CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp):' $task/status
  done | sort | uniq -c; say 'exit 0'
say root; while read -r id parent device root point options rest
  do [ "$point" = / ] && echo "root ${options%%,*}"; done < /proc/$pid/mountinfo; say 'exit 0'
say namespaces; for of in mnt net ipc uts pid
  do [ "$(readlink /proc/$pid/ns/$of)" = "$(readlink /proc/self/ns/$of)" ] && echo "shared $of"
  done; say 'exit 0'
profiled
by_pod() { for file in $(newest)
  do $PERFUSION report "$file" --format folded --type cpu --by k8s.pod.name 2> /dev/null
  done | cut -d';' -f1 | sort -u; }
both_pods() { [ "$(by_pod | grep -c -e '^chain-0$' -e '^load-0$')" = 2 ]; }
say pods; until_true both_pods; code=$?; by_pod; say "exit $code"
say names
  $PERFUSION report "$(ls -t /var/lib/perfusion/profiles/load/*.pb.gz | head -1)" 2>&1 | tail -12
  say 'exit 0'
say limits; get /metrics | grep -E '^perfusion_(reduced|rate_steps) '; say 'exit 0'

say stopped; crun kill perfusion TERM; wait $runner; say "exit $?"
say region; until_true no_region; say "exit $?"
say said; cat /tmp/said; say 'exit 0'
say control; crun run --bundle /opt/check/control control 2>&1; say "exit $?"
# The filter has the kernel log what it refuses.
say refused
  dmesg | grep -E 'type=1326' | grep -oE 'comm="[^"]*"|exe="[^"]*"|syscall=[0-9]+' |
  paste -d ' ' - - - | sort | uniq -c; say 'exit 0'
say end
"#;

/// The bundles, and the volumes that are not directories of the node.
fn fill(paths: &WorkspacePaths, steps: &StepLog, check: &Path) -> Result<()> {
    let values = check.join("values.yaml");
    write(&values, VALUES)?;
    let [daemon_set, config_map] =
        helm::as_json(paths, steps, &values, ["daemonset.yaml", "configmap.yaml"])?;
    let image = image::image(paths, steps)?;
    let pod = &daemon_set["spec"]["template"]["spec"];

    let volume = check.join("volumes/config");
    fs::create_dir_all(&volume).with_context(|| format!("{}: cannot be made", volume.display()))?;
    for (name, text) in config_map["data"].as_object().context("a ConfigMap without data")? {
        write(&volume.join(name), text.as_str().context("a ConfigMap's text")?)?;
    }
    let filter: Value =
        serde_json::from_str(config_map["data"]["seccomp.json"].as_str().unwrap_or_default())
            .context("the ConfigMap's seccomp.json")?;

    let containers = ["initContainers", "containers"].map(|kind| &pod[kind]);
    for (containers, name) in containers.into_iter().zip(BUNDLES) {
        let [container] = containers.as_array().map_or(&[] as &[Value], Vec::as_slice) else {
            bail!("the chart: expected one container `{name}`, found {containers}");
        };
        if container["name"] != name {
            bail!("the chart: expected a container `{name}`, found {}", container["name"]);
        }
        let profile = &container["securityContext"]["seccompProfile"]["localhostProfile"];
        if let Some(profile) = profile.as_str() {
            write(&check.join("profile"), profile)?;
        }
        let bundle = check.join(name);
        fs::create_dir_all(&bundle)
            .with_context(|| format!("{}: cannot be made", bundle.display()))?;
        output(Command::new("cp").arg("-r").arg(&image).arg(bundle.join("rootfs")))?;
        let config = oci(pod, container, profile.is_string().then_some(&filter))
            .with_context(|| format!("the chart's container `{name}`"))?;
        write(&bundle.join("config.json"), &config.to_string())?;
        if profile.is_string() {
            control(check, &bundle, config)?;
        }
    }
    Ok(())
}

/// The same container with a program that asks for what it may not: that the kernel says so there
/// shows that its silence means something.
fn control(check: &Path, bundle: &Path, mut config: Value) -> Result<()> {
    let control = check.join("control");
    output(Command::new("cp").arg("-r").arg(bundle).arg(&control))?;
    fs::copy("/bin/busybox", control.join("rootfs/busybox")).context("busybox cannot be copied")?;
    config["process"]["args"] = json!(["/busybox", "chroot", "/", "/busybox", "true"]);
    write(&control.join("config.json"), &config.to_string())
}

/// What containerd's CRI plugin hands to an OCI runtime for a container: version 1.7,
/// `internal/cri/opts` and `oci.defaultMounts`.
///
/// Left out: the container runtime's own filter where `RuntimeDefault` is asked for (it is made of
/// code), SELinux and AppArmor.
fn oci(pod: &Value, container: &Value, filter: Option<&Value>) -> Result<Value> {
    let security = |name: &str| {
        let own = &container["securityContext"][name];
        if own.is_null() { &pod["securityContext"][name] } else { own }
    };
    if security("privileged") != false || security("allowPrivilegeEscalation") != false {
        bail!("expected neither privileged nor allowPrivilegeEscalation");
    }
    if pod["hostPID"] != true || !pod["hostNetwork"].is_null() || !pod["hostIPC"].is_null() {
        bail!("expected hostPID alone of the node's namespaces");
    }
    if security("capabilities")["drop"] != json!(["ALL"]) {
        bail!("expected all capabilities to be dropped first");
    }
    let added = security("capabilities")["add"].as_array().cloned().unwrap_or_default();
    let capabilities: Vec<String> =
        added.iter().filter_map(Value::as_str).map(|name| format!("CAP_{name}")).collect();
    let mut arguments = vec![json!("/usr/bin/perfusion")];
    arguments.extend(container["args"].as_array().cloned().unwrap_or_default());
    let mut environment = vec!["PATH=/usr/bin".to_owned()];
    for variable in container["env"].as_array().unwrap_or(&Vec::new()) {
        let name = variable["name"].as_str().context("a variable without a name")?;
        let value = match &variable["valueFrom"]["fieldRef"]["fieldPath"] {
            Value::Null => variable["value"].as_str().unwrap_or_default(),
            field if field == "spec.nodeName" => NODE,
            other => bail!("a variable from {other}, which nothing here knows"),
        };
        environment.push(format!("{name}={value}"));
    }
    let mut linux = json!({
        // No `pid`: hostPID.
        "namespaces": [{"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network"},
        {"type": "cgroup"}],
        "cgroupsPath": format!("/kubepods/burstable/pod00000000-1111-2222-3333-444444444444/{}",
        container["name"].as_str().unwrap_or_default()),
        "resources": {
            "devices": [{"allow": false, "access": "rwm"}],
            "memory": {"limit": bytes(&container["resources"]["limits"]["memory"])?},
        },
        "maskedPaths": [
            "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
            "/proc/timer_list", "/proc/timer_stats",
            "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
        ],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    });
    if let Some(filter) = filter {
        linux["seccomp"] = json!({
            "defaultAction": filter["defaultAction"],
            "defaultErrnoRet": filter["defaultErrnoRet"],
            "syscalls": filter["syscalls"],
            // Not the chart's: the kernel says what it refuses.
            "flags": ["SECCOMP_FILTER_FLAG_LOG"],
        });
    }
    Ok(json!({
        "ociVersion": "1.0.2",
        "hostname": "perfusion",
        "root": {"path": "rootfs", "readonly": security("readOnlyRootFilesystem")},
        "process": {
            "args": arguments,
            "env": environment,
            "cwd": "/",
            "user": {"uid": security("runAsUser"), "gid": security("runAsGroup")},
            "noNewPrivileges": true,
            "capabilities": {"bounding": capabilities, "effective": capabilities,
            "permitted": capabilities},
        },
        "mounts": mounts(pod, container)?,
        "linux": linux,
    }))
}

/// The runtime's own, and the container's volumes.
fn mounts(pod: &Value, container: &Value) -> Result<Vec<Value>> {
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc",
        "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
        "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]}),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts",
               "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620",
               "gid=5"]}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
        "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]}),
        json!({"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
        "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"]}),
        json!({"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
        "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]}),
    ];
    let none = Vec::new();
    for mount in container["volumeMounts"].as_array().unwrap_or(&none) {
        let volumes = pod["volumes"].as_array().unwrap_or(&none);
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]);
        let volume = volume.with_context(|| format!("no volume {}", mount["name"]))?;
        let source = match volume["hostPath"]["path"].as_str() {
            Some(path) => path.to_owned(),
            None if volume["configMap"].is_object() || volume["emptyDir"].is_object() => {
                format!("{VOLUMES}/{}", volume["name"].as_str().unwrap_or_default())
            }
            None => bail!("a volume that nothing here knows: {volume}"),
        };
        let mode = if mount["readOnly"] == true { "ro" } else { "rw" };
        mounts.push(json!({"destination": mount["mountPath"], "type": "bind", "source": source,
        "options": ["rbind", "rprivate", mode]}));
    }
    Ok(mounts)
}

/// A quantity of memory as the chart writes it: `512Mi`.
fn bytes(quantity: &Value) -> Result<u64> {
    let mebibytes = quantity.as_str().and_then(|text| text.strip_suffix("Mi")?.parse::<u64>().ok());
    mebibytes
        .map(|mebibytes| mebibytes << 20)
        .with_context(|| format!("expected so many Mi, found {quantity}"))
}

/// Parts that end with 0 when all is well.
const WELL: [(&str, &str); 7] = [
    ("init", "the init container puts the list of system calls on the node"),
    ("profile", "under the name that the pod asks for, as the chart has it"),
    ("ready", "the daemon starts, and /readyz says so"),
    ("alive", "so does /healthz"),
    ("pods", "samples have the names of their pods"),
    ("stopped", "told to end, it ends well"),
    ("region", "its library leaves the program"),
];

fn judge(verdicts: &mut Verdicts<'_>) {
    verdicts.all_end_well(&PROFILED);
    verdicts.all_end_well(&WELL);
    verdicts.check("confined", "no thread can gain privileges, and each has the filter", |part| {
        // Each line is how many threads say the same.
        let lines = |name: &str| part.lines.iter().filter(|line| line.contains(name)).count();
        lines("NoNewPrivs:") == 1
            && lines("Seccomp:") == 1
            && part.lines.iter().any(|line| line.trim_end().ends_with("NoNewPrivs:\t1"))
            && part.lines.iter().any(|line| line.trim_end().ends_with("Seccomp:\t2"))
    });
    verdicts.check("root", "its root is read-only", |part| {
        part.lines.iter().any(|line| line == "root ro")
    });
    verdicts.check("namespaces", "of the node's namespaces it has the processes' alone", |part| {
        part.lines.iter().filter(|line| line.starts_with("shared")).eq(["shared pid"])
    });
    verdicts.check("limits", "nothing is reduced or lowered", |part| {
        has(part, "perfusion_reduced 0") && has(part, "perfusion_rate_steps 0")
    });
    verdicts.check(
        "refused",
        "no system call was refused but that of a program that must not make it",
        |part| {
            // chroot(2) is 161.
            let of_control =
                |line: &str| line.contains("comm=\"busybox\"") && line.ends_with("syscall=161");
            let mut refused = part.lines.iter().filter(|line| !line.is_empty()).peekable();
            refused.peek().is_some() && refused.all(|line| of_control(line.trim_end()))
        },
    );
}

#[cfg(test)]
mod tests {
    use super::{bytes, oci};
    use serde_json::{Value, json};

    fn pod() -> Value {
        json!({
            "hostPID": true,
            "securityContext": {"runAsUser": 0, "runAsGroup": 0},
            "volumes": [
                {"name": "config", "configMap": {"name": "perfusion"}},
                {"name": "state",
                "hostPath": {"path": "/var/lib/perfusion", "type": "DirectoryOrCreate"}},
            ],
        })
    }

    fn container() -> Value {
        json!({
            "name": "perfusion",
            "args": ["daemon"],
            "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            "securityContext": {
                "privileged": false,
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"], "add": ["BPF", "PERFMON"]},
            },
            "resources": {"limits": {"memory": "512Mi"}},
            "volumeMounts": [
                {"name": "config", "mountPath": "/etc/perfusion", "readOnly": true},
                {"name": "state", "mountPath": "/var/lib/perfusion"},
            ],
        })
    }

    #[test]
    fn a_container_has_what_its_pod_says_and_nothing_more() {
        let filter = json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1,
        "syscalls": [{"names": ["bpf"]}]});
        let made = oci(&pod(), &container(), Some(&filter)).unwrap();
        for set in ["bounding", "effective", "permitted"] {
            assert_eq!(made["process"]["capabilities"][set], json!(["CAP_BPF", "CAP_PERFMON"]));
        }
        assert_eq!(made["process"]["noNewPrivileges"], true);
        assert_eq!(made["process"]["args"], json!(["/usr/bin/perfusion", "daemon"]));
        assert_eq!(made["process"]["env"], json!(["PATH=/usr/bin", "NODE=node-1"]));
        assert_eq!(made["root"]["readonly"], true);
        assert_eq!(made["linux"]["resources"]["memory"]["limit"], 512 << 20);
        assert_eq!(made["linux"]["seccomp"]["syscalls"], filter["syscalls"]);
        let mounts = made["mounts"].as_array().unwrap();
        let last: Vec<_> = mounts
            .iter()
            .rev()
            .take(2)
            .map(|mount| (&mount["source"], &mount["options"][2]))
            .collect();
        assert_eq!(
            last,
            [
                (&json!("/var/lib/perfusion"), &json!("rw")),
                (&json!("/opt/check/volumes/config"), &json!("ro"))
            ]
        );
        assert!(!made["linux"]["namespaces"].to_string().contains("pid"));
    }

    #[test]
    fn more_than_the_chart_may_ask_for_is_refused() {
        let mut container = container();
        container["securityContext"]["privileged"] = json!(true);
        assert!(oci(&pod(), &container, None).is_err());
        let mut pod = pod();
        pod["hostNetwork"] = json!(true);
        assert!(oci(&pod, &self::container(), None).is_err());
        assert!(bytes(&json!("1Gi")).is_err());
    }
}
