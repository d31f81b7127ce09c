//! Live objects of known counts (`alive.cs`), of which only a few can be watched: do the estimates
//! and their 95 % intervals hold the truth?

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use perfusion_aggregate::interval::Estimate;
use perfusion_report::top::TableOptions;
use perfusion_report::types::{TypeRow, rows};
use perfusion_sources::shim::ShimLimits;
use profiler_protocol::counter::Counter;
use serde_json::{Value, json};

use super::allocations::ALL_SAMPLES;
use super::tap::Tap;
use crate::app::Workload;
use crate::environment::Runtime;

/// The types of `alive.cs`, and bytes of one object.
const TYPES: [(&str, f64); 4] = [
    ("Alive.Node", 24.0),
    ("Alive.Page[]", 2_048.0),
    ("Alive.Block[]", 20_000.0),
    ("Alive.Huge[]", 300_000.0),
];
/// Objects that can be watched: the fewest that can be asked for. Twice as many or more are sampled
/// and alive.
const WATCHED: u32 = 256;

/// Times objects are made in a window: after that as many die as come.
const ROUNDS: usize = 16;

/// One window: truth and estimate, objects and bytes, of each type and of all four together (the
/// last).
#[derive(Clone, Debug)]
pub struct Window {
    /// Objects of each type.
    pub objects: Vec<Known>,
    /// Bytes of each type.
    pub bytes: Vec<Known>,
    /// Objects that were watched.
    pub watched: i64,
    /// False where the runtime samples by a stride: no interval is stated.
    pub has_interval: bool,
}

/// A figure and its truth.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// By the program.
    pub truth: f64,
    /// By the profile.
    pub estimate: Estimate,
    /// Seen themselves.
    pub seen: f64,
}

impl Known {
    /// True when the stated interval holds the truth.
    pub fn covered(&self) -> bool {
        self.estimate.interval95(self.seen).holds(self.truth)
    }
}

/// Fills the program's memory anew `windows` times, with so many samples told of in a second.
///
/// # Errors
/// When the program or the recorder fails, or chance never had to choose.
pub fn measure(
    runtime: Runtime,
    windows: usize,
    allocation_samples: u32,
) -> anyhow::Result<Vec<Window>> {
    let app = Workload::dotnet(runtime, "alive", &[])?.start()?;
    let mut tap =
        Tap::attach_whole(app, ShimLimits { live_objects: WATCHED, allocation_samples }, "fill")?;
    let mut all = Vec::new();
    for _ in 0..windows {
        tap.perform("clear")?;
        tap.perform("collect")?;
        for _ in 0..ROUNDS {
            tap.perform("fill")?;
        }
        // Once more where the first was passed over because the watched objects were being
        // downsampled at that moment.
        tap.perform("collect")?;
        tap.perform("collect")?;
        let counts = tap.ask("alive", "counts")?;
        all.push(window(&counts, &rows(&tap.profile()?, "inuse_space", &TableOptions::default()))?);
    }
    ensure!(tap.counted(Counter::ObjectsDownsampled) > 0, "there was room for all");
    // What is watched is then a part of a part.
    let left_out = tap.counted(Counter::AllocationsDownsampled);
    ensure!(left_out > 0 || allocation_samples == ALL_SAMPLES, "every sample was told of");
    ensure!(
        tap.counted(Counter::HandlesFull) == 0,
        "some were not watched without chance having chosen"
    );
    tap.stop()?;
    Ok(all)
}

fn window(counts: &Value, rows: &[TypeRow]) -> anyhow::Result<Window> {
    let mut window =
        Window { objects: Vec::new(), bytes: Vec::new(), watched: 0, has_interval: true };
    for (at, (name, size)) in TYPES.into_iter().enumerate() {
        let count = counts.get(at).and_then(Value::as_f64).with_context(|| format!("{counts}"))?;
        let row = rows.iter().find(|row| row.name == name);
        let known = |truth, of: Option<(Estimate, f64)>| {
            let (estimate, seen) = of.unwrap_or_default();
            Known { truth, estimate, seen }
        };
        window.objects.push(known(count, row.map(|row| (row.objects, row.seen as f64))));
        window.bytes.push(known(count * size, row.map(|row| (row.bytes, row.seen_bytes))));
        window.watched += row.map_or(0, |row| row.seen);
        window.has_interval &= row.is_none_or(|row| row.has_interval);
    }
    for of in [&mut window.objects, &mut window.bytes] {
        let mut all = Known { truth: 0.0, estimate: Estimate::default(), seen: 0.0 };
        for known in of.iter() {
            all.truth += known.truth;
            all.estimate.add(known.estimate);
            all.seen += known.seen;
        }
        of.push(all);
    }
    Ok(window)
}

/// Of all windows: mean of estimate / truth, its standard error (of what was found), and how many
/// intervals hold the truth.
pub fn sum(windows: &[Window], of: impl Fn(&Window) -> Known) -> (f64, f64, usize) {
    let ratios: Vec<f64> =
        windows.iter().map(|window| of(window).estimate.value / of(window).truth).collect();
    let count = ratios.len().max(2) as f64;
    let mean = ratios.iter().sum::<f64>() / count;
    let spread = ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, (spread / count).sqrt(), windows.iter().filter(|window| of(window).covered()).count())
}

/// A table of what was found.
///
/// # Errors
/// Never, but writing to text can by its type.
pub fn markdown(runtime: Runtime, windows: &[Window]) -> anyhow::Result<String> {
    let watched =
        windows.iter().map(|window| window.watched).sum::<i64>() / windows.len().max(1) as i64;
    let mut text = format!(
        "\n| {runtime}, alive, {} windows, {watched} objects watched in the mean | objects: \
         estimate / truth | in the interval | bytes: estimate / truth | in the interval \
         |\n|---|---|---|---|---|\n",
        windows.len()
    );
    for at in 0..=TYPES.len() {
        let title = TYPES.get(at).map_or_else(
            || "all four together".to_owned(),
            |(name, size)| format!("`{}`, {size} B", name.trim_start_matches("Alive.")),
        );
        let figures = |of: &dyn Fn(&Window) -> Known| {
            let (mean, stderr, covered) = sum(windows, of);
            match windows.iter().all(|window| window.has_interval) {
                true => format!(
                    "{mean:.4} ± {stderr:.4} | {:.1} %",
                    covered as f64 / windows.len() as f64 * 100.0
                ),
                false => format!("{mean:.4} ± {stderr:.4} | none stated"),
            }
        };
        let (objects, bytes) =
            (figures(&|window| window.objects[at]), figures(&|window| window.bytes[at]));
        writeln!(text, "| {title} | {objects} | {bytes} |")?;
    }
    Ok(text)
}

/// For machines.
pub fn json(windows: &[Window]) -> Value {
    let mut values = json!({"windows": windows.len()});
    for at in 0..=TYPES.len() {
        let name = TYPES.get(at).map_or("all", |(name, _)| name);
        let figures = |of: &dyn Fn(&Window) -> Known| {
            let (ratio, stderr, covered) = sum(windows, of);
            json!({"ratio": ratio, "stderr": stderr, "covered": covered})
        };
        values[name] = json!({"objects": figures(&|window| window.objects[at]),
        "bytes": figures(&|window| window.bytes[at])});
    }
    values
}
