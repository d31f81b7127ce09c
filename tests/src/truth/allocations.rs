//! Eight types of known counts and sizes (`known.cs`): are the estimates unbiased, and do the 95 %
//! intervals of `perfusion report` hold the truth in 95 of 100 cells (a type in a window)? On .NET
//! 8 and 9, which sample by a fixed stride: how far off are they?

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use perfusion_report::top::TableOptions;
use perfusion_report::types::{TypeRow, rows};
use perfusion_sources::shim::ShimLimits;
use profiler_protocol::counter::Counter;
use serde_json::{Value, json};

use super::tap::Tap;
use crate::app::Workload;
use crate::environment::Runtime;

/// Objects of (type, bytes each) in one batch of `known.cs`.
const BATCH: [(&str, f64, f64); 12] = [
    ("Known.Tiny", 24.0, 100_000.0),
    ("Known.TinyRef", 24.0, 25_000.0),
    ("Known.Ash[]", 128.0, 40_000.0),
    ("Known.Birch[]", 128.0, 5_000.0),
    ("Known.Cedar[]", 2_048.0, 400.0),
    ("Known.Elm[]", 20_000.0, 25.0),
    ("Known.Fir[]", 300_000.0, 6.0),
    ("Known.Mixed[]", 32.0, 4_000.0),
    ("Known.Mixed[]", 128.0, 1_000.0),
    ("Known.Mixed[]", 2_048.0, 100.0),
    ("Known.Mixed[]", 20_000.0, 10.0),
    ("Known.Mixed[]", 300_000.0, 2.0),
];
/// The same of the command `steps`.
const STEPS: [(&str, f64, f64); 2] =
    [("Known.Wide[]", 50_000.0, 100.0), ("Known.Filler", 24.0, 225_000.0)];
/// Batches in one window: a dozen samples or more are expected of each type.
const BATCHES: usize = 4;
/// In those of which not all samples are told.
const DOWNSAMPLED_BATCHES: usize = 64;
/// Samples told of in a second then.
const DOWNSAMPLED_SAMPLES: u32 = 256;
/// More than there are.
pub const ALL_SAMPLES: u32 = 1_000_000;

/// One type in one window.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The type.
    pub name: &'static str,
    /// Objects allocated, by the program.
    pub true_objects: f64,
    /// Their bytes.
    pub true_bytes: f64,
    /// What the profile says; `None` when it does not know the type.
    pub row: Option<TypeRow>,
}

/// What was found of many cells.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Cells.
    pub cells: usize,
    /// Of them, those whose interval holds the truth.
    pub covered: usize,
    /// Estimates together, by the truth together.
    pub ratio: f64,
    /// Standard error of that, by the stated variances.
    pub stderr: f64,
}

/// Objects or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// Objects.
    Objects,
    /// Bytes.
    Bytes,
}

impl Cell {
    fn truth(&self, of: Of) -> f64 {
        if of == Of::Objects { self.true_objects } else { self.true_bytes }
    }

    fn estimate(&self, of: Of) -> (f64, f64, bool) {
        let Some(row) = &self.row else { return (0.0, 0.0, false) };
        let (estimate, seen) = if of == Of::Objects {
            (row.objects, row.seen as f64)
        } else {
            (row.bytes, row.seen_bytes)
        };
        let holds = row.has_interval && estimate.interval95(seen).holds(self.truth(of));
        (estimate.value, estimate.variance, holds)
    }
}

/// Sums up the cells of one type, or of all.
pub fn sum(cells: &[Cell], name: Option<&str>, of: Of) -> Sum {
    let (mut sum, mut truth, mut estimate, mut variance) = (Sum::default(), 0.0, 0.0, 0.0);
    for cell in cells.iter().filter(|cell| name.is_none_or(|name| cell.name == name)) {
        let (value, spread, holds) = cell.estimate(of);
        // Each cell counts alike: a sum over types would be the largest type's alone.
        let share = 1.0 / cell.truth(of);
        truth += 1.0;
        estimate += value * share;
        variance += spread * share * share;
        sum.cells += 1;
        sum.covered += usize::from(holds);
    }
    Sum { ratio: estimate / truth, stderr: variance.sqrt() / truth, ..sum }
}

/// The cells whose interval does not hold the truth, a line each: what a failed test has to say
/// beyond sums.
pub fn missed(cells: &[Cell], of: Of) -> String {
    let types = names(cells).len().max(1);
    let mut text = String::new();
    for (at, cell) in cells.iter().enumerate() {
        let (value, variance, holds) = cell.estimate(of);
        if !holds {
            let (window, name, truth) = (at / types, cell.name, cell.truth(of));
            let (ratio, errors) = (value / truth, (value - truth) / variance.sqrt());
            let seen = cell.row.as_ref().map_or(0, |row| row.seen);
            writeln!(
                text,
                "window {window}: {name} {ratio:.3}, {errors:+.2} standard errors, {seen} seen"
            )
            .unwrap_or_default();
        }
    }
    text
}

/// Records `windows` windows of batches, and as many of the pattern that misleads a stride. All
/// samples are told.
///
/// # Errors
/// When the program or the recorder fails.
pub fn measure(runtime: Runtime, windows: usize) -> anyhow::Result<(Vec<Cell>, Vec<Cell>)> {
    let app = Workload::dotnet(runtime, "known", &[])?.start()?;
    let mut tap = Tap::attach(
        app,
        ShimLimits { allocation_samples: ALL_SAMPLES, ..ShimLimits::default() },
        "batch",
    )?;
    let (mut cells, mut steps) = (Vec::new(), Vec::new());
    for _ in 0..windows {
        for _ in 0..BATCHES {
            tap.perform("batch")?;
        }
        cells.extend(read(&mut tap, &BATCH, BATCHES as f64)?);
        for _ in 0..BATCHES {
            tap.perform("steps")?;
        }
        steps.extend(read(&mut tap, &STEPS, BATCHES as f64)?);
    }
    tap.stop()?;
    Ok((cells, steps))
}

/// Records `windows` windows of batches in which many more samples come than are told of.
///
/// # Errors
/// When the program or the recorder fails, or hardly any sample was left out.
pub fn measure_downsampled(runtime: Runtime, windows: usize) -> anyhow::Result<Vec<Cell>> {
    let app = Workload::dotnet(runtime, "known", &[])?.start()?;
    let limits = ShimLimits { allocation_samples: DOWNSAMPLED_SAMPLES, ..ShimLimits::default() };
    let mut tap = Tap::attach(app, limits, "batch")?;
    let mut cells = Vec::new();
    for _ in 0..windows {
        for _ in 0..DOWNSAMPLED_BATCHES {
            tap.perform("batch")?;
        }
        cells.extend(read(&mut tap, &BATCH, DOWNSAMPLED_BATCHES as f64)?);
    }
    let (all, downsampled) =
        (tap.counted(Counter::AllocationSamples), tap.counted(Counter::AllocationsDownsampled));
    ensure!(downsampled * 2 > all, "{downsampled} of {all} samples were left out");
    tap.stop()?;
    Ok(cells)
}

fn read(
    tap: &mut Tap,
    made: &[(&'static str, f64, f64)],
    batches: f64,
) -> anyhow::Result<Vec<Cell>> {
    let rows = rows(&tap.profile()?, "alloc_space", &TableOptions::default());
    tap.next();
    let mut cells: Vec<Cell> = Vec::new();
    for &(name, size, count) in made {
        let (objects, bytes) = (count * batches, count * batches * size);
        match cells.iter_mut().find(|cell| cell.name == name) {
            Some(cell) => {
                cell.true_objects += objects;
                cell.true_bytes += bytes;
            }
            None => cells.push(Cell {
                name,
                true_objects: objects,
                true_bytes: bytes,
                row: rows.iter().find(|row| row.name == name).cloned(),
            }),
        }
    }
    Ok(cells)
}

/// Names of the types, in the order of `cells`.
fn names(cells: &[Cell]) -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for cell in cells {
        if !names.contains(&cell.name) {
            names.push(cell.name);
        }
    }
    names
}

/// A table of what was found on one runtime.
///
/// # Errors
/// When there are no cells.
pub fn markdown(runtime: Runtime, cells: &[Cell]) -> anyhow::Result<String> {
    let mut text = format!(
        "\n| {runtime}, {} windows | objects: estimate / truth | in the interval | bytes: estimate \
         / truth | in the interval | samples |\n|---|---|---|---|---|---|\n",
        cells.len() / names(cells).len().max(1)
    );
    let mut line = |title: &str, name: Option<&str>| {
        let of_it = || cells.iter().filter(|cell| name.is_none_or(|name| cell.name == name));
        let sure = of_it().flat_map(|cell| &cell.row).all(|row| row.has_interval);
        let figures = |of| {
            let sum = sum(cells, name, of);
            match sure {
                true => format!(
                    "{:.4} ± {:.4} | {:.1} % of {}",
                    sum.ratio,
                    sum.stderr,
                    sum.covered as f64 / sum.cells as f64 * 100.0,
                    sum.cells
                ),
                false => format!("{:.3} | none stated", sum.ratio),
            }
        };
        let seen: i64 = of_it().flat_map(|cell| &cell.row).map(|row| row.seen).sum();
        writeln!(text, "| {title} | {} | {} | {seen} |", figures(Of::Objects), figures(Of::Bytes))
    };
    for name in names(cells) {
        let each = cells.iter().find(|cell| cell.name == name).context("no cell")?;
        let mean = each.true_bytes / each.true_objects;
        line(&format!("`{}`, {mean:.0} B", name.trim_start_matches("Known.")), Some(name))?;
    }
    line("all, each cell alike", None)?;
    Ok(text)
}

/// For machines.
pub fn json(cells: &[Cell]) -> Value {
    let of = |of| {
        let all = sum(cells, None, of);
        json!({"cells": all.cells, "covered": all.covered, "ratio": all.ratio,
        "stderr": all.stderr})
    };
    json!({"objects": of(Of::Objects), "bytes": of(Of::Bytes)})
}
