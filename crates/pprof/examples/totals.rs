//! Prints the total of each sample type of a profile, whoever wrote it:
//! `cargo run -p perfusion-pprof --example totals -- profile.pb.gz`.

use perfusion_pprof::{PprofError, read};
use std::error::Error;

/// Name, unit and total of each sample type.
fn totals(bytes: &[u8]) -> Result<Vec<(String, String, i64)>, PprofError> {
    let profile = read::read(bytes)?.profile;
    let text = |at: i64| {
        let text = usize::try_from(at).ok().and_then(|at| profile.string_table.get(at));
        text.cloned().unwrap_or_default()
    };
    let of = |column: usize| profile.sample.iter().filter_map(move |of| of.value.get(column));
    let types = profile.sample_type.iter().enumerate();
    Ok(types
        .map(|(column, of_type)| (text(of_type.r#type), text(of_type.unit), of(column).sum()))
        .collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of a profile")?;
    for (name, unit, total) in totals(&std::fs::read(path)?)? {
        println!("{total:>20} {unit:<12} {name}");
    }
    Ok(())
}

#[test]
fn the_total_is_that_of_all_samples() -> Result<(), Box<dyn Error>> {
    use perfusion_pprof::proto::{Profile, Sample, ValueType};
    let sample = |value| Sample { value: vec![value], ..Sample::default() };
    let profile = Profile {
        string_table: ["", "cpu", "nanoseconds"].map(str::to_owned).to_vec(),
        sample_type: vec![ValueType { r#type: 1, unit: 2 }],
        sample: vec![sample(30), sample(12)],
        ..Profile::default()
    };
    let found = totals(&perfusion_pprof::pack(&profile)?)?;
    assert_eq!(found, [("cpu".to_owned(), "nanoseconds".to_owned(), 42)]);
    Ok(())
}
