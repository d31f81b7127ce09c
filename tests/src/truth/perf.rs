//! The same workload seen by `perf record -g` (frame pointers, names from the runtime's perf map),
//! judged by the same judge.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::app::Workload;
use crate::environment::Need;
use crate::perfusion::Scratch;
use crate::profile::{Frame, Profile, Sample, Source};
use crate::truth::measure::{Declared, Measured, Mode, Options, judged};

/// Why there is no comparison here, or `None`.
pub fn missing() -> Option<String> {
    Need::Program("perf").missing()
}

/// Starts the program and records it with perf.
///
/// # Errors
/// When the program or perf fails.
pub fn attached(workload: &Workload, options: Options) -> anyhow::Result<Measured> {
    // The runtime maps code twice by default, and perf finds its names only where it was written.
    let workload =
        workload.clone().env("DOTNET_PerfMapEnabled", "1").env("DOTNET_EnableWriteXorExecute", "0");
    let app = workload.start()?;
    let declared = Declared::read(app.ready())?;
    let scratch = Scratch::new()?;
    let file = scratch.path("perf.data");
    let run = |command: &mut Command| {
        let output = command
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {command:?}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{command:?}: {}\n{said}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (frequency, pid) = (options.frequency_hz.to_string(), app.pid().to_string());
    let length = options.length.as_secs_f64().to_string();
    run(Command::new("perf")
        .args(["record", "-g", "-e", "cpu-clock", "-F", &frequency, "-p", &pid, "-o"])
        .arg(&file)
        .args(["--", "sleep", &length]))?;
    // While the program is there: its perf map is named after its pid.
    let text = run(Command::new("perf").args(["script", "-F", "tid,ip,sym,dso", "-i"]).arg(&file))?;
    app.stop()?;
    Ok(judged(&Profile::from_samples(&["samples", "wall"], samples(&text)), &declared, Mode::Perf))
}

/// Reads what `perf script -F tid,ip,sym,dso` prints: a thread id, then a line a frame, innermost
/// first, then an empty line.
fn samples(text: &str) -> Vec<Sample> {
    let mut samples = Vec::new();
    for block in text.split("\n\n") {
        let mut lines = block.lines().filter(|line| !line.trim().is_empty());
        let Some(tid) = lines.next().map(str::trim) else { continue };
        let mut stack: Vec<Frame> = lines.filter_map(frame).collect();
        stack.reverse();
        let labels = BTreeMap::from([("thread_id".to_owned(), tid.to_owned())]);
        samples.push(Sample::new(stack, labels, vec![1, 1]));
    }
    samples
}

/// `7f1234 symbol (file)`.
fn frame(line: &str) -> Option<Frame> {
    let (_, rest) = line.trim().split_once(' ')?;
    let (symbol, file) = rest.rsplit_once(" (").unwrap_or((rest, ""));
    let function = name(symbol).replace("::", ".");
    let (mapping, source) = (file.trim_end_matches(')').to_owned(), Source::default());
    Some(Frame { function, mapping, location: 0, source })
}

/// `int32 [app] Space.Type::Method(int32)[Tier1]` → `Space.Type::Method`.
fn name(symbol: &str) -> &str {
    let method = symbol.rsplit_once("] ").map_or(symbol, |(_, method)| method);
    method.split(['(', '[']).next().filter(|name| !name.is_empty()).unwrap_or(method)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::samples;

    #[test]
    fn perfs_text_is_read() {
        let text = "  77\n\
                    \t    7f01 int32 [callheavy] CallHeavy.Program::L8(int32)[Tier1] \
             (/tmp/perf-76.map)\n\
                    \t    7f02 void [callheavy] CallHeavy.Program::Loop()[OptimizedTier1OSR] \
             (/tmp/perf-76.map)\n\
                    \t    7f03 [unknown] (/usr/lib/libc.so.6)\n\n  78\n\t ffff asm_irq \
             ([kernel.kallsyms])\n\n";
        let samples = samples(text);
        assert_eq!(samples[0].label("thread_id"), "77");
        let names: Vec<&str> =
            samples[0].stack.iter().map(|frame| frame.function.as_str()).collect();
        assert_eq!(names, ["[unknown]", "CallHeavy.Program.Loop", "CallHeavy.Program.L8"]);
        assert_eq!(samples[1].stack[0].mapping, "[kernel.kallsyms]");
    }
}
