//! `tide-bench`: TIDE's collectives on real models' tensors, checked and tabulated.

mod backend;
mod cli;
mod doctor;
mod examine;
mod failure;
mod generate;
mod gradient;
mod grads;
mod legs;
mod memory;
mod model_file;
mod plan_cmd;
mod presets;
mod progress;
mod replay;
mod report;
mod run;
mod save;
mod site;
mod tensors;
#[cfg(test)]
mod testing;
mod verify;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use tracing_subscriber::filter::LevelFilter;

use crate::cli::{Cli, Command};

/// Lets the library say on standard error what it does, as `TIDE_DEBUG` asks: WARN (the default), INFO, DEBUG, TRACE or NONE.
fn speak() {
    let asked = std::env::var("TIDE_DEBUG").unwrap_or_default().to_ascii_lowercase();
    let level = match asked.as_str() {
        "none" => LevelFilter::OFF,
        other => other.parse().unwrap_or(LevelFilter::WARN),
    };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false).init();
}

fn main() -> ExitCode {
    speak();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => error.exit(),
        Err(error) => return refuse(&cli::one_sentence(&error), failure::BAD_USAGE),
    };
    let outcome = match cli.command {
        None => run::run(&cli.run),
        Some(Command::Run(arguments)) => run::run(&arguments),
        Some(Command::Plan(arguments)) => plan_cmd::plan(&arguments).map(|()| true),
        Some(Command::Replay(arguments)) => replay::replay(&arguments),
        Some(Command::Doctor(arguments)) => return ExitCode::from(doctor::report(&arguments)),
    };
    if let (Ok(_), Some(why)) = (&outcome, report::lost_output()) {
        return refuse(&format!("the results could not be written: {why}"), failure::BAD_USAGE);
    }
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(failure::WRONG_DATA),
        Err(error) => {
            let status = failure::exit_status(&error);
            let code = refuse(&format!("{error:#}"), status);
            if status == failure::FAIL_STOP {
                backend::exit_now(status);
            }
            code
        }
    }
}

fn refuse(sentence: &str, status: u8) -> ExitCode {
    // A file may name a tensor by anything: one sentence stays one line.
    let shown: String =
        sentence.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect();
    eprintln!("tide-bench: {shown}");
    ExitCode::from(status)
}
