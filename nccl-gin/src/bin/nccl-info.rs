//! Prints which NCCL would be used, and what it lacks. Exit status: 0 if one loads, 1 if none does.

use nccl_gin::host::{Library, hazards};
use std::process::ExitCode;

fn main() -> ExitCode {
    let library = match Library::load() {
        Ok(library) => library,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("NCCL {} at {}", library.version(), library.path().display());
    match library.device_bitcode() {
        Some(path) => println!("device bitcode at {}", path.display()),
        None => println!("no device bitcode beside it"),
    }
    for (ability, reason) in library.lacks() {
        println!("lacks {}: {reason}", ability.name());
    }
    for hazard in hazards() {
        println!("{}={}: {}", hazard.variable, hazard.value, hazard.why);
    }
    ExitCode::SUCCESS
}
