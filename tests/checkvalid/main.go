// Command checkvalid reads the named pprof files with google/pprof's own parser and applies its CheckValid.
//
// It prints one line a file and exits with 1 when one of them is refused. ParseData already checks; the second call is there
// because Perfusion promises CheckValid by name.
package main

import (
	"fmt"
	"os"

	"github.com/google/pprof/profile"
)

func check(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	p, err := profile.ParseData(data)
	if err != nil {
		return fmt.Errorf("parse: %w", err)
	}
	if err := p.CheckValid(); err != nil {
		return fmt.Errorf("CheckValid: %w", err)
	}
	// Merge is what every server does with a profile; it also refuses types that do not fit themselves.
	if _, err := profile.Merge([]*profile.Profile{p, p.Copy()}); err != nil {
		return fmt.Errorf("merge with itself: %w", err)
	}
	fmt.Printf("%s: valid: %d sample types, %d samples, %d locations, %d functions\n",
		path, len(p.SampleType), len(p.Sample), len(p.Location), len(p.Function))
	return nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: checkvalid FILE.pb.gz...")
		os.Exit(2)
	}
	for _, path := range os.Args[1:] {
		if err := check(path); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
			os.Exit(1)
		}
	}
}
