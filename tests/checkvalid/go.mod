module perfusion.dev/tests/checkvalid

go 1.22

require github.com/google/pprof v0.0.0-20240727154555-813a5fbdbec8

require (
	github.com/chzyer/readline v1.5.1 // indirect
	github.com/ianlancetaylor/demangle v0.0.0-20240312041847-bd984b5ce465 // indirect
	golang.org/x/sys v0.6.0 // indirect
)
