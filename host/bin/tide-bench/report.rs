//! What a run tells: the header, the table, the footer, and the same as JSON.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use serde::Serialize;

/// The columns: their names, and their units below.
const COLUMNS: [(&str, &str); 18] = [
    ("coll", ""),
    ("size", "(B)"),
    ("count", "(elements)"),
    ("type", ""),
    ("redop", ""),
    ("root", ""),
    ("time min", "(us)"),
    ("median", "(us)"),
    ("max", "(us)"),
    ("algbw", "(GB/s)"),
    ("busbw", "(GB/s)"),
    ("#wrong", ""),
    ("max err", ""),
    ("bound", ""),
    ("buffer", "(B/rank)"),
    ("stock", "(B/rank)"),
    ("buf/stock", ""),
    ("descr", "(/rank)"),
];
/// Columns of words, which stand to the left.
const WORD_COLUMNS: [usize; 3] = [0, 3, 4];

/// Times of the timed calls, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    /// The fastest call.
    pub min: f64,
    /// The middle one; the mean of two where their number is even.
    pub median: f64,
    /// The slowest call.
    pub max: f64,
}

impl Times {
    /// The times of at least one call.
    ///
    /// # Panics
    /// Without any call.
    pub fn of(calls: &[Duration]) -> Self {
        let mut us: Vec<f64> = calls.iter().map(|d| d.as_secs_f64() * 1e6).collect();
        us.sort_by(f64::total_cmp);
        let (low, high) = ((us.len() - 1) / 2, us.len() / 2);
        Self { min: us[0], median: f64::midpoint(us[low], us[high]), max: us[us.len() - 1] }
    }
}

/// One collective's results; the fields up to `digest` are those of the JSON.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// `ag` or `rs`.
    pub collective: &'static str,
    /// The machine.
    pub backend: &'static str,
    /// Who drove the network, or `stock` where the baseline ran instead.
    pub path: &'static str,
    /// `M`.
    pub nodes: u32,
    /// `L`.
    pub gpus: u32,
    /// `P`.
    pub params: u64,
    /// Bytes of the whole group in its own type, without padding.
    pub group_bytes: u64,
    /// Bytes of one rank's output, with padding.
    pub out_bytes: u64,
    /// Times of the calls.
    pub time_us: Times,
    /// Group bytes over the median time; none on the simulator.
    pub algbw_gbps: Option<f64>,
    /// `algbw · (N − 1)/N`.
    pub busbw_gbps: Option<f64>,
    /// Elements that are wrong; none where nothing was checked.
    pub wrong: Option<u64>,
    /// The largest error.
    pub max_abs_err: Option<f64>,
    /// The error allowed.
    pub err_bound: Option<f64>,
    /// Bytes that each rank allocated, as the collective counts them.
    pub buffer_bytes: u64,
    /// The same for the baseline.
    pub stock_buffer_bytes: u64,
    /// Copy descriptors of a rank and call.
    pub descriptors: u64,
    /// XXH3-128 over the ranks' own digests, in rank order, each XXH3-128 over that rank's outputs.
    pub digest: String,
    /// Elements of the group, for the table.
    #[serde(skip)]
    pub count: u64,
    /// The elements' type, for the table.
    #[serde(skip)]
    pub dtype: String,
}

impl Row {
    /// Whether nothing is known to be wrong.
    pub fn is_right(&self) -> bool {
        self.wrong.unwrap_or(0) == 0
    }

    fn cells(&self) -> [String; COLUMNS.len()] {
        let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |r| format!("{r:.2}"));
        let checked = |text: Option<String>| text.unwrap_or_else(|| "N/A".to_owned());
        [
            self.collective.to_owned(),
            self.group_bytes.to_string(),
            self.count.to_string(),
            self.dtype.clone(),
            if self.collective == "rs" { "sum" } else { "none" }.to_owned(),
            "-1".to_owned(),
            format!("{:.1}", self.time_us.min),
            format!("{:.1}", self.time_us.median),
            format!("{:.1}", self.time_us.max),
            rate(self.algbw_gbps),
            rate(self.busbw_gbps),
            checked(self.wrong.map(|n| n.to_string())),
            checked(self.max_abs_err.map(|x| format!("{x:.1e}"))),
            checked(self.err_bound.map(|x| format!("{x:.1e}"))),
            self.buffer_bytes.to_string(),
            self.stock_buffer_bytes.to_string(),
            ratio(self.buffer_bytes, self.stock_buffer_bytes),
            self.descriptors.to_string(),
        ]
    }
}

fn ratio(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.3}", part as f64 / whole as f64) }
}

/// Cells in columns, without lines between them.
pub fn columns(rows: impl IntoIterator<Item = Vec<String>>, words: &[usize]) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(NOTHING);
    rows.into_iter().for_each(|row| {
        table.add_row(row);
    });
    for (index, column) in table.column_iter_mut().enumerate() {
        let left = words.contains(&index);
        column.set_cell_alignment(if left { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

/// The table: two lines of header, then a line of each collective.
pub fn table(rows: &[Row]) -> String {
    let names = COLUMNS.map(|(name, _)| name.to_owned()).to_vec();
    let units = COLUMNS.map(|(_, unit)| unit.to_owned()).to_vec();
    let cells = [names, units].into_iter().chain(rows.iter().map(|row| row.cells().to_vec()));
    let mut text = String::new();
    for (index, line) in columns(cells, &WORD_COLUMNS).iter().enumerate() {
        let _ = writeln!(text, "{}{line}", if index < 2 { "#" } else { " " });
    }
    text
}

/// The lines below the table: digests and the verdict that scripts look for.
pub fn footer(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let _ = writeln!(text, "# {} digest : {}", row.collective, row.digest);
    }
    let wrong: u64 = rows.iter().filter_map(|row| row.wrong).sum();
    let verdict = if wrong == 0 { "OK" } else { "FAILED" };
    if rows.iter().any(|row| row.wrong.is_none()) {
        text.push_str("# Out of bounds values : N/A (not checked)\n");
    } else {
        let _ = writeln!(text, "# Out of bounds values : {wrong} {verdict}");
    }
    let rates: Vec<f64> = rows.iter().filter_map(|row| row.busbw_gbps).collect();
    let average = match rates.len() {
        0 => "-".to_owned(),
        n => format!("{:.5}", rates.iter().sum::<f64>() / n as f64),
    };
    let _ = writeln!(text, "# Avg bus bandwidth    : {average}");
    text
}

/// The results as JSON.
///
/// # Errors
/// None that a row of numbers can cause.
pub fn json(rows: &[Row]) -> anyhow::Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        results: &'a [Row],
    }
    Ok(serde_json::to_string_pretty(&Results { results: rows })? + "\n")
}

/// Where the words of a run go. Standard output is left to JSON where `--json -` asks for it.
#[derive(Debug, Clone, Copy)]
pub enum Voice {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// Nowhere: another process speaks.
    Silent,
}

impl Voice {
    /// The place that leaves `--json`'s alone.
    pub fn beside(json: Option<&Path>) -> Self {
        if json == Some(Path::new("-")) { Self::Stderr } else { Self::Stdout }
    }

    /// Writes `text` as it is. A reader that has gone away is no failure of the run; any other is kept for
    /// [`lost_output`].
    pub fn say(self, text: &str) {
        use std::io::Write;
        let written = match self {
            Self::Stdout => std::io::stdout().lock().write_all(text.as_bytes()),
            Self::Stderr => std::io::stderr().lock().write_all(text.as_bytes()),
            Self::Silent => Ok(()),
        };
        if let Err(error) = written
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            // The first is the one to tell.
            let _ = LOST_OUTPUT.set(error.to_string());
        }
    }
}

static LOST_OUTPUT: OnceLock<String> = OnceLock::new();

/// Why some of what was said did not come out, if so.
pub fn lost_output() -> Option<&'static str> {
    LOST_OUTPUT.get().map(String::as_str)
}

/// Delivers JSON to a file or, for `-`, to standard output.
///
/// # Errors
/// The file cannot be written.
pub fn deliver_json(path: &Path, text: &str) -> anyhow::Result<()> {
    if path == Path::new("-") {
        Voice::Stdout.say(text);
        return Ok(());
    }
    crate::save::write_text(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            collective: "rs",
            backend: "sim",
            path: "device",
            nodes: 2,
            gpus: 4,
            params: 12,
            group_bytes: 14_175_744,
            out_bytes: 3_543_936,
            time_us: Times { min: 1.0, median: 2.0, max: 3.5 },
            algbw_gbps: None,
            busbw_gbps: None,
            wrong: Some(0),
            max_abs_err: Some(2.5e-7),
            err_bound: Some(1e-4),
            buffer_bytes: 500,
            stock_buffer_bytes: 1000,
            descriptors: 72,
            digest: "00ff".into(),
            count: 7_087_872,
            dtype: "bf16".into(),
        }
    }

    #[test]
    fn everything_but_a_row_starts_with_a_hash() {
        let text = table(&[row()]) + &footer(&[row()]);
        let rows: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(rows.len(), 1, "{text}");
        let cells: Vec<&str> = rows[0].split_whitespace().collect();
        assert_eq!(cells.len(), COLUMNS.len(), "{text}");
        assert_eq!(cells[..6], ["rs", "14175744", "7087872", "bf16", "sum", "-1"]);
        assert_eq!((cells[9], cells[10], cells[11], cells[16]), ("-", "-", "0", "0.500"));
        assert!(text.contains("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : -\n"), "{text}");
    }

    #[test]
    fn wrong_and_unchecked_data_say_so() {
        let wrong = Row { wrong: Some(3), ..row() };
        assert!(footer(&[row(), wrong]).contains("# Out of bounds values : 3 FAILED"));
        let unchecked = Row { wrong: None, max_abs_err: None, err_bound: None, ..row() };
        assert!(footer(std::slice::from_ref(&unchecked)).contains("N/A"));
        assert!(table(&[unchecked]).contains("N/A"));
    }

    #[test]
    fn json_has_these_keys_and_no_others() {
        let value: serde_json::Value = serde_json::from_str(&json(&[row()]).unwrap()).unwrap();
        let mut keys: Vec<&str> = value["results"][0].as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        let mut expected = [
            "collective",
            "backend",
            "path",
            "nodes",
            "gpus",
            "params",
            "group_bytes",
            "out_bytes",
            "time_us",
            "algbw_gbps",
            "busbw_gbps",
            "wrong",
            "max_abs_err",
            "err_bound",
            "buffer_bytes",
            "stock_buffer_bytes",
            "descriptors",
            "digest",
        ];
        expected.sort_unstable();
        assert_eq!(keys, expected);
        assert!(value["results"][0]["algbw_gbps"].is_null());
        assert_eq!(value["results"][0]["time_us"]["median"], 2.0);
    }

    #[test]
    fn the_median_is_the_middle() {
        let us = |n: u64| Duration::from_micros(n);
        assert_eq!(Times::of(&[us(9), us(1), us(2)]), Times { min: 1.0, median: 2.0, max: 9.0 });
        assert!((Times::of(&[us(4), us(2)]).median - 3.0).abs() < 1e-9);
    }
}
