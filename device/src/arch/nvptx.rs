//! The machine as PTX. To come with the PTX build; the host never compiles this file.
